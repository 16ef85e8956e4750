"""How many tokens vLLM's steps may have, with requests as its scheduler has them."""

from __future__ import annotations

from typing import Any

import pytest

from actors.engine.slices import Pace, Step, StepTimes
from encoder_service.engines.vllm_steps import paced
from tests.unit.vllm_half import Scheduler, running


def scheduler(requests: tuple[Any, ...]) -> Any:
    """A paced one. A step beside 16,000 tokens takes twice as long as beside few."""
    pace = Pace(5)
    pace.times = StepTimes(768, [8, 256, 448, 768])
    pace.times.add(Step(768, 0), 20)
    pace.times.add(Step(768, 16_000), 40)
    return paced(Scheduler, pace)(list(requests))


@pytest.mark.parametrize(
    ("requests", "tokens"),
    [
        ((), 2048),
        ((running(0), running(3999)), 2048),  # nobody waits for the next token
        ((running(4000),), 768),
        ((running(4063), running(1024)), 768),
        ((running(4063), running(3000)), 768),
        ((running(4063), running(16_000, 20_000)), 448),  # of 460 that take 1.2 times as long
        ((running(4063), running(10**6, 10**7)), 1 + 192),
        ((*[running(4063)] * 500, running(10**6, 10**7)), 500 + 192),
        ((*[running(4063, drafts=4)] * 200, running(0)), 1000 + 192),
        ((*[running(4063, drafts=9)] * 200, running(0)), 2048),
    ],
)
def test_steps_in_which_requests_decode_read_fewer_tokens(
    requests: tuple[Any, ...], tokens: int
) -> None:
    """But all that those requests need."""
    made = scheduler(requests)
    assert made.schedule() == tokens
    with pytest.raises(RuntimeError, match="throttled"):
        made.schedule(throttle_prefills=True)
    assert made.max_num_scheduled_tokens == 2048


def test_where_vllm_reads_whole_blocks_a_step_has_room_for_one() -> None:
    made = scheduler((*[running(4063)] * 300, running(0)))
    made.need_mamba_block_aligned_split = True
    assert made.schedule() == 300 + made.cache_config.block_size
