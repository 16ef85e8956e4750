"""The encoder's answers to health checks of Serve and of routers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from actors.encoder import Encoder
from actors.errors import Unavailable
from actors.options import EncoderOptions


@dataclass
class StuckEngine:
    """An engine in which no pack has finished for `seconds`."""

    seconds: float
    running: bool = True

    def stalled_seconds(self) -> float:
        return self.seconds

    def alive(self) -> bool:
        return self.running


def asked(engine: StuckEngine, *, decodes: bool = True) -> None:
    options = SimpleNamespace(encoder=EncoderOptions(max_stall_seconds=60))
    decoder = SimpleNamespace(alive=lambda: decodes)
    pipeline = SimpleNamespace(decoder=decoder, engine=engine)
    encoder: Any = SimpleNamespace(options=options, pipeline=pipeline)
    asyncio.run(Encoder.check_health(encoder))


def test_one_whose_work_moves_is_well() -> None:
    asked(StuckEngine(59))


@pytest.mark.parametrize(
    ("engine", "why"), [(StuckEngine(61), "for 61 s"), (StuckEngine(0, running=False), "has ended")]
)
def test_one_that_is_stuck_is_to_be_replaced(engine: StuckEngine, why: str) -> None:
    with pytest.raises(Unavailable, match=why):
        asked(engine)


def test_one_that_decodes_nothing_any_more_is_to_be_replaced() -> None:
    with pytest.raises(Unavailable, match="do not start"):
        asked(StuckEngine(0), decodes=False)
