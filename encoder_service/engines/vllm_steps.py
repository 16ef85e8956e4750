"""The steps of vLLM's scheduler with the place "local": how many tokens they may have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actors.engine.slices import Pace, Step

LEAST_SHARE = 4
"""However long the context, a step has room for 1 / LEAST_SHARE of a full one's tokens, besides
those of requests that decode."""


def paced(scheduler: type[Any], pace: Pace) -> type[Any]:
    """vLLM's Scheduler, or a class derived from it, with steps of `step_tokens`."""

    class PacedScheduler(scheduler):  # type: ignore[misc]
        max_num_scheduled_tokens: int

        def schedule(self, *arguments: Any, **options: Any) -> Any:
            most = self.max_num_scheduled_tokens
            # Of some models with mamba layers, vLLM reads prompts in whole blocks only.
            block = self.cache_config.block_size if self.need_mamba_block_aligned_split else 0
            self.max_num_scheduled_tokens = step_tokens(pace, self.running, most, block)
            try:
                return super().schedule(*arguments, **options)
            finally:
                self.max_num_scheduled_tokens = most

    return PacedScheduler


def step_tokens(pace: Pace, running: Sequence[Any], most: int, block: int) -> int:
    """Maximum tokens of the next step, with these requests of vLLM.

    `most` if none of them decodes. Otherwise fewer, but enough for all that decode, and besides for
    a part of a full step, or for `block`. The context is that of the first prompt.
    """
    decoding = [one for one in running if one.num_computed_tokens >= one.num_prompt_tokens]
    if not decoding:
        return most
    contexts = (
        one.num_computed_tokens
        for one in running
        if one.num_computed_tokens < one.num_prompt_tokens
    )
    tokens = pace.times.tokens_beside(next(contexts, 0), pace.stretch)
    needed: int = sum(
        one.num_tokens_with_spec + one.num_output_placeholders - one.num_computed_tokens
        for one in decoding
    )
    least = needed + max(block, int(pace.times.full_tokens / LEAST_SHARE))
    return min(most, max(int(tokens), least))


def step_of(scheduler_output: Any) -> Step:
    tokens = scheduler_output.total_num_scheduled_tokens
    counts, known = scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_cached_reqs
    computed = dict(zip(known.req_ids, known.num_computed_tokens, strict=True))
    computed |= {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
    before = sum(count * computed[request] for request, count in counts.items())
    return Step(tokens, before // max(1, tokens))
