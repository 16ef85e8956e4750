"""An item's way through the actor: bytes in, shared rows out, one word to the event loop a call."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.engine.encoded import Encoded
from actors.errors import InvalidMedia, Unavailable
from actors.media.decoding import Decoding
from actors.media.image import prepare
from actors.media.patchify import patchifier_of
from actors.options import ActorOptions, EncoderOptions, GraphOptions, ModelOptions
from actors.pipeline import Call, Made, Stages
from actors.startup import open_engine
from actors.store.cache import Entry
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Media, Size
from tests.images import jpeg


class Rig:
    """The stages of a small model on the CPU, and a gate that holds the engine's thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        options = ActorOptions(
            model=ModelOptions(id="qwen3vl-tiny", load_format="dummy", dtype="float32"),
            encoder=EncoderOptions(device="cpu", num_gpus=0),
            graphs=GraphOptions(token_budgets=(64, 256), max_frames_per_batch=0),
        )
        series = EncoderMetrics()
        self.engine = open_engine(options, series)
        self.tower: Any = self.engine.tower
        self.gate = threading.Event()
        self.gate.set()
        self.reached = threading.Event()
        forward = self.tower.forward

        def held(path: str, values: Any) -> Tensor:
            self.reached.set()
            self.gate.wait(60)
            rows: Tensor = forward(path, values)
            return rows

        monkeypatch.setattr(self.tower, "forward", held)
        self.stages = Stages(
            self.engine, Decoding(patchifier_of(self.tower.spec), 2, series), series
        )
        self.shared: list[list[Media]] = []
        self.rows: list[weakref.ref[Tensor]] = []

    def media(self, width: int, data: bytes | None = None) -> Media:
        plan = self.tower.spec.sizing.plan(Size(width, 64))
        return Media("image", jpeg(width, 64) if data is None else data, plan, str(width))

    def share(self, done: Sequence[tuple[Media, Tensor]]) -> list[Entry]:
        self.shared.append([media for media, _ in done])
        self.rows += [weakref.ref(rows) for _, rows in done]
        return [
            Entry(rows.view(torch.uint8).numpy().copy().reshape(-1), "float32", tuple(rows.shape))  # type: ignore[arg-type]
            for _, rows in done
        ]

    def begin(self, media: Sequence[Media]) -> Call:
        return self.stages.begin(media, self.share)

    def hold(self) -> None:
        """Closes the gate behind one item, so that what comes next has to wait."""
        self.reached.clear()
        self.gate.clear()
        self.begin([self.media(640)])
        assert self.reached.wait(60)

    def ready(self, count: int) -> bool:
        """So many are decoded and wait for the engine."""
        return len(self.engine._waiting) == count


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    rig = Rig(monkeypatch)
    yield rig
    rig.gate.set()
    rig.stages.close()


def test_what_lands_before_a_sharer_comes_is_shared_together(rig: Rig) -> None:
    async def run() -> None:
        call = Call([rig.media(64)] * 5, rig.share)
        landed = [Future[Encoded]() for _ in call.works]
        pairs = list(zip(call.works, landed, strict=True))
        assert [call.land(*pair) for pair in pairs[:3]] == [True, False, False]
        assert call.landed() == pairs[:3]
        assert [call.land(*pair) for pair in pairs[3:]] == [True, False]
        assert call.landed() == pairs[3:]

    asyncio.run(run())


async def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        await asyncio.sleep(0.005)


def test_the_loop_hears_of_a_call_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        rig.hold()
        loop, told = asyncio.get_running_loop(), []
        tell = loop.call_soon_threadsafe
        media = [rig.media(32 * n) for n in range(1, 9)]
        call = rig.begin(media)
        await until(lambda: rig.ready(8))

        def counted(*args: Any) -> Any:
            told.append(args)
            return tell(*args)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        rig.gate.set()
        await call.wait(60)
        assert len(told) <= 2, "once for these, and once for the one at the gate"
        assert sum(map(len, rig.shared)) == 9
        for one, work in zip(media, call.works, strict=True):
            assert isinstance(work.outcome, Made)
            assert work.outcome.entry.shape == (one.plan.tokens, rig.tower.spec.width)
            assert work.outcome.source == "graph"
            assert 0 < work.decoded <= work.landed
            alone = rig.engine.submit(prepare(patchifier_of(rig.tower.spec), one)).result().rows
            found = torch.from_numpy(work.outcome.entry.data).view(torch.float32)
            torch.testing.assert_close(found.view(alone.shape), alone, rtol=1e-3, atol=1e-3)

    asyncio.run(run())


def test_a_bad_item_fails_alone(rig: Rig) -> None:
    async def run() -> None:
        call = rig.begin([rig.media(64), rig.media(96, b"\xff\xd8\xff no"), rig.media(128)])
        await call.wait(60)
        kinds = [type(work.outcome) for work in call.works]
        assert kinds == [Made, InvalidMedia, Made]

    asyncio.run(run())


def test_rows_that_cannot_be_shared_fail_their_items(rig: Rig) -> None:
    def full(done: Sequence[tuple[Media, Tensor]]) -> list[Entry]:
        raise Unavailable("the object store is full")

    async def run() -> None:
        call = rig.stages.begin([rig.media(64)], full)
        await call.wait(60)
        assert isinstance(call.works[0].outcome, Unavailable)

    asyncio.run(run())


def test_what_is_late_is_given_up(rig: Rig) -> None:
    async def run() -> None:
        rig.hold()
        call = rig.begin([rig.media(64)] * 3)
        await until(lambda: rig.ready(3))
        await call.wait(0.05)
        assert [work.outcome for work in call.works] == [None] * 3
        rig.gate.set()
        await rig.begin([rig.media(96)]).wait(60)
        late = [media.plan.tokens for group in rig.shared for media in group]
        assert rig.media(64).plan.tokens not in late, "nobody waits for it: it is not encoded"

    asyncio.run(run())


def test_rows_go_at_once_without_the_garbage_collector(rig: Rig) -> None:
    async def run() -> None:
        await rig.begin([rig.media(32 * n) for n in range(1, 5)]).wait(60)
        await rig.begin([rig.media(64)]).wait(60)  # the engine's frame holds the last pack
        await until(lambda: all(rows() is None for rows in rig.rows[:4]))

    gc.collect()
    gc.disable()
    try:
        asyncio.run(run())
    finally:
        gc.enable()


def test_a_call_of_nothing_is_over_at_once(rig: Rig) -> None:
    async def run() -> None:
        await asyncio.wait_for(rig.begin([]).wait(100), 5)

    asyncio.run(run())


def test_what_comes_after_the_end_is_for_another_replica(rig: Rig) -> None:
    rig.stages.close()

    async def run() -> None:
        with pytest.raises(Unavailable, match="stopping"):
            rig.begin([rig.media(64)])

    asyncio.run(run())
