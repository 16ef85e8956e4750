"""One answer at a time on one device: transformers' `generate`, its text as it grows, its end."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable, Mapping
from threading import Event
from typing import Any

import torch
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from encoder_service.llm.stops import StopFilter
from encoder_service.llm.types import Finish, Sampling

Emit = Callable[[str], None]
"""Told of each piece of the text, in the thread that generates."""


class Cancelled(Exception):
    """Nobody wants the answer any more."""


class Generator:
    """A loaded model with its tokenizer. Not to be used by two threads at once."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model = model
        self.tokenizer = tokenizer

    def generate(
        self,
        inputs: Mapping[str, Any],
        sampling: Sampling,
        max_tokens: int,
        emit: Emit,
        cancelled: Event,
    ) -> Finish:
        """Emits the whole text, then returns. `inputs`: see model.inputs. Raises Cancelled."""
        if cancelled.is_set():
            raise Cancelled
        config = self._config(sampling, max_tokens)
        stream = TextStream(self.tokenizer, sampling.stop, emit)
        criteria = StoppingCriteriaList([Ended(lambda: cancelled.is_set() or stream.stopped)])
        # The process generates nothing else, so its one random state is this answer's.
        torch.manual_seed(secrets.randbits(63) if sampling.seed is None else sampling.seed)
        with torch.inference_mode():
            self.model.generate(
                **{name: self._here(value) for name, value in inputs.items()},
                generation_config=config,
                stopping_criteria=criteria,
                streamer=stream,
            )
        if cancelled.is_set():
            raise Cancelled
        ended = stream.stopped or stream.ids[-1] in self._ends(config)
        prompt_tokens = inputs["input_ids"].shape[1]
        return Finish("stop" if ended else "length", prompt_tokens, len(stream.ids))

    def _config(self, sampling: Sampling, max_tokens: int) -> GenerationConfig:
        """The checkpoint's own, but for what the request says."""
        config = copy.deepcopy(self.model.generation_config)
        config.max_new_tokens, config.max_length, config.num_return_sequences = max_tokens, None, 1
        if sampling.temperature == 0:
            config.do_sample = False
        elif sampling.temperature is not None:
            config.do_sample, config.temperature = True, sampling.temperature
        if not config.do_sample:
            config.temperature = config.top_p = config.top_k = None
        elif sampling.top_p is not None:
            config.top_p = sampling.top_p
        if config.pad_token_id is None:
            config.pad_token_id = next(iter(self._ends(config)), 0)
        return config

    def _ends(self, config: GenerationConfig) -> tuple[int, ...]:
        ends = config.eos_token_id
        return () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)

    def _here(self, value: Any) -> Any:
        return value.to(self.model.device) if isinstance(value, Tensor) else value


class Ended(StoppingCriteria):  # type: ignore[misc]
    """Asked by `generate` after each token."""

    def __init__(self, ended: Callable[[], bool]) -> None:
        self.ended = ended

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        """Whether each sequence is complete."""
        return torch.full((len(input_ids),), self.ended(), device=input_ids.device)


class TextStream(BaseStreamer):  # type: ignore[misc]
    """Tokens to text as soon as they are whole characters, up to a stop text."""

    def __init__(self, tokenizer: Any, stops: tuple[str, ...], emit: Emit) -> None:
        self.tokenizer = tokenizer
        self.decoder = DecodeStream(skip_special_tokens=True)
        self.filter = StopFilter(stops)
        self.emit = emit
        self.ids: list[int] = []
        self.decoded = ""
        self.in_prompt = True

    @property
    def stopped(self) -> bool:
        """A stop text has come."""
        return self.filter.stopped

    def put(self, value: Tensor) -> None:
        """The prompt first, then token by token."""
        if self.in_prompt:
            self.in_prompt = False
            return
        for token in value.flatten().tolist():
            self.ids.append(token)
            self._show(self.decoder.step(self.tokenizer.backend_tokenizer, token) or "")

    def end(self) -> None:
        """What was held back: half a stop text, bytes that are no whole character."""
        whole = self.tokenizer.decode(
            self.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        if whole.startswith(self.decoded):
            self._show(whole[len(self.decoded) :])
        if rest := self.filter.rest():
            self.emit(rest)

    def _show(self, text: str) -> None:
        self.decoded += text
        if shown := self.filter.feed(text):
            self.emit(shown)
