"""An item's way through the actor: bytes in, rows out."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.errors import DeadlineExceeded, EmbeddingLost, EncodeFailed, InvalidMedia, Unavailable
from actors.media.image import prepare
from actors.media.patchify import patchifier_of
from actors.options import ActorOptions, EncoderOptions, GraphOptions, ModelOptions
from actors.pipeline import Pipeline, open_pipeline, result_of
from actors.store import writer as writing
from actors.store.kept import PendingWrite
from actors.store.writer import RowWriter, tensor
from actors.telemetry.metrics import EncoderMetrics
from actors.telemetry.tracing import open_spans
from actors.types import Answer, Bytes, Dtype, Embedding, Item, Media, Reply, SharedBytes, Size
from tests.images import jpeg


class Rig:
    """The pipeline of a small model on the CPU, and a gate that holds the engine's thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        options = ActorOptions(
            model=ModelOptions(id="qwen3vl-tiny", load_format="dummy", dtype="float32"),
            encoder=EncoderOptions(device="cpu", num_gpus=0),
            graphs=GraphOptions(token_budgets=(64, 256), max_frames_per_batch=0),
        )
        spans = open_spans(options.tracing, "encoder")
        self.pipeline: Pipeline = open_pipeline(options, EncoderMetrics(), spans, "one")
        self.engine = self.pipeline.engine
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
        self.written: list[list[Media]] = []
        self.rows: list[weakref.ref[Tensor]] = []
        write = self.pipeline.writer.write

        def noted(
            dtype: Dtype, done: Sequence[tuple[Media, Item]], *, lend: bool
        ) -> list[Embedding]:
            self.written.append([media for media, _ in done])
            self.rows += [weakref.ref(item.rows) for _, item in done]
            # Copies: on the CPU an answer is a view of its rows.
            return [copied(one) for one in write(dtype, done, lend=lend)]

        monkeypatch.setattr(self.pipeline.writer, "write", noted)

    def media(self, width: int, data: bytes | None = None) -> Media:
        plan = self.tower.spec.sizing.plan(Size(width, 64))
        return Media("image", jpeg(width, 64) if data is None else data, plan, str(width))

    def begin(self, media: Sequence[Media], seconds: float = 60) -> asyncio.Task[list[Answer]]:
        return asyncio.create_task(self.encode(media, seconds))

    async def encode(self, media: Sequence[Media], seconds: float, **options: Any) -> list[Answer]:
        answers = await self.pipeline.encode(media, "float32", seconds, **options)
        return [answers[place] for place in sorted(answers)]

    async def hold(self) -> None:
        """Closes the gate behind one item, so that what comes next has to wait."""
        self.reached.clear()
        self.gate.clear()
        self.held = self.begin([self.media(640)])
        assert await asyncio.to_thread(self.reached.wait, 60)

    def ready(self, count: int) -> bool:
        """So many items are decoded and wait for the engine."""
        return len(self.engine._waiting) == count


def copied(embedding: Embedding) -> Embedding:
    assert isinstance(embedding.data, np.ndarray)
    return replace(embedding, data=embedding.data.copy())


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    rig = Rig(monkeypatch)
    yield rig
    rig.gate.set()
    rig.pipeline.close()


async def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        await asyncio.sleep(0.005)


async def test_answers_come_early_in_groups_that_leave_the_engine_together(rig: Rig) -> None:
    await rig.hold()
    media = [rig.media(32 * n) for n in range(1, 9)]
    media[3] = rig.media(64, b"no image")
    parts: list[Reply] = []
    call = asyncio.create_task(rig.pipeline.encode(media, "float32", 60, early=parts.append))
    await until(lambda: rig.ready(7) and bool(parts))
    assert [part.places for part in parts] == [(3,)], "it fails before the others are encoded"
    rig.gate.set()
    last = await call
    answers = {
        place: one for part in parts for place, one in zip(part.places, part.answers, strict=True)
    }
    assert sorted([*answers, *last]) == list(range(8))
    for place, answer in (answers | last).items():
        if place == 3:
            assert isinstance(answer, InvalidMedia)
        else:
            assert isinstance(answer, Embedding)
            assert answer.grid_thw == media[place].plan.grid_thw
    assert len(parts) <= len(rig.written), "what was written together is answered together"


async def test_what_is_late_is_answered_with_the_last(rig: Rig) -> None:
    await rig.hold()
    media = [rig.media(32), rig.media(64, b"no image"), rig.media(96)]
    parts: list[Reply] = []
    last = await rig.pipeline.encode(media, "float32", 0.5, early=parts.append)
    assert [part.places for part in parts] == [(1,)]
    assert {place: type(answer) for place, answer in last.items()} == {
        0: DeadlineExceeded,
        2: DeadlineExceeded,
    }


async def test_each_item_gets_its_own_rows(rig: Rig) -> None:
    await rig.hold()
    media = [rig.media(32 * n) for n in range(1, 9)]
    call = rig.begin(media)
    await until(lambda: rig.ready(8))
    rig.gate.set()
    answers = await call
    assert sum(map(len, rig.written)) == 9
    for one, answer in zip(media, answers, strict=True):
        assert isinstance(answer, Embedding)
        assert isinstance(answer.data, np.ndarray)
        assert answer.shape == (one.plan.tokens, rig.tower.spec.width)
        assert (answer.source, answer.replica) == ("graph", "one")
        assert answer.timings.preprocess_seconds > 0
        assert answer.timings.encode_seconds > 0
        item = prepare(patchifier_of(rig.tower.spec), one)
        alone = rig.engine.submit(item).result().rows
        found = torch.from_numpy(answer.data).view(torch.float32).view(alone.shape)
        torch.testing.assert_close(found, alone, rtol=1e-3, atol=1e-3)


async def test_a_bad_item_fails_alone(rig: Rig) -> None:
    media = [rig.media(64), rig.media(96, b"\xff\xd8\xff no"), rig.media(128)]
    kinds = [type(answer) for answer in await rig.begin(media)]
    assert kinds == [Embedding, InvalidMedia, Embedding]


@pytest.mark.parametrize(
    ("error", "answered"),
    [(Unavailable("the object store is full"), Unavailable), (MemoryError("full"), EncodeFailed)],
)
def test_rows_that_cannot_be_written_fail_their_items(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, error: Exception, answered: type[Exception]
) -> None:
    def full(*_: Any, **__: Any) -> list[Embedding]:
        raise error

    monkeypatch.setattr(rig.pipeline.writer, "write", full)

    async def run() -> None:
        (answer,) = await rig.begin([rig.media(64)])
        assert isinstance(answer, answered)
        assert "full" in str(answer)

    asyncio.run(run())


async def test_late_items_are_dropped(rig: Rig) -> None:
    await rig.hold()
    call = rig.begin([rig.media(64)] * 3, 0.5)
    await until(lambda: rig.ready(3))
    assert [type(answer) for answer in await call] == [DeadlineExceeded] * 3
    rig.gate.set()
    await rig.begin([rig.media(96)])
    late = [media.plan.tokens for group in rig.written for media in group]
    assert rig.media(64).plan.tokens not in late, "nobody waits for it: it is not encoded"


async def test_a_cancelled_call_is_dropped(rig: Rig) -> None:
    await rig.hold()
    call = rig.begin([rig.media(64)] * 3)
    await until(lambda: rig.ready(3))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    rig.gate.set()
    await rig.held
    assert sum(map(len, rig.written)) == 1


def test_rows_go_at_once_without_the_garbage_collector(rig: Rig) -> None:
    async def run() -> None:
        await rig.begin([rig.media(32 * n) for n in range(1, 5)])
        await rig.begin([rig.media(64)])  # the engine's frame holds the last pack
        await until(lambda: all(rows() is None for rows in rig.rows[:4]))

    gc.collect()
    gc.disable()
    try:
        asyncio.run(run())
    finally:
        gc.enable()


async def test_a_call_of_nothing_is_over_at_once(rig: Rig) -> None:
    assert await asyncio.wait_for(rig.begin([], 100), 5) == []


def test_a_closed_pipeline_refuses_new_calls(rig: Rig) -> None:
    rig.pipeline.close()

    async def run() -> None:
        with pytest.raises(Unavailable, match="stopping"):
            await rig.begin([rig.media(64)])

    asyncio.run(run())


async def test_a_future_is_cancelled_with_whoever_waits_for_it() -> None:
    future: Future[int] = Future()
    waiting = asyncio.create_task(result_of(future))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert future.cancelled()


class Kept:
    """A pipeline whose rows are large enough for shared memory, which a gate stands for."""

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rig = rig
        self.gate = threading.Event()
        self.failure: Exception | None = None

        def put(arrays: Sequence[Any], most_bytes: int = 0) -> list[Any]:
            assert self.gate.wait(10)
            if self.failure:
                raise self.failure
            return list(arrays)

        monkeypatch.setattr(writing, "share_together", put)
        monkeypatch.setattr("actors.pipeline.INLINE_BYTES", 4000)

    async def keep(self, *widths: int, **options: Any) -> list[str]:
        """Encodes these; their names."""
        media = [self.rig.media(width) for width in widths]
        answers = await self.rig.encode(media, 20, keep=True, **options)
        for answer in answers:
            assert isinstance(answer, Embedding)
            assert (answer.reference.partition(".")[0], len(answer.data)) == ("one", 0)  # type: ignore[arg-type]
        return [answer.reference.partition(".")[2] for answer in answers]  # type: ignore[union-attr]

    def rows(self, name: str) -> Bytes | None:
        """What is not written yet. None: it is written."""
        kept = self.rig.pipeline.references.get(name, 0)
        assert kept
        data = kept.embedding.data
        assert isinstance(data, SharedBytes)
        assert isinstance(data.object_ref, PendingWrite)
        return data.object_ref.rows


@pytest.fixture
def kept(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    kept = Kept(rig, monkeypatch)
    yield kept
    kept.gate.set()


async def test_an_item_that_is_kept_is_answered_before_it_is_written(kept: Kept) -> None:
    (name,) = await kept.keep(128)
    assert kept.rows(name) is not None
    given_up = asyncio.create_task(kept.rig.pipeline.fetch(name))
    await asyncio.sleep(0)
    given_up.cancel()
    fetching = asyncio.create_task(kept.rig.pipeline.fetch(name))
    kept.gate.set()
    found = await fetching
    assert found
    assert isinstance(found.embedding.data, np.ndarray)
    assert found.embedding.data.nbytes == found.embedding.size_bytes > 4000


async def test_rows_are_written_before_the_answer_if_their_memory_is_full(kept: Kept) -> None:
    """The last third is for rows on their way."""
    lender = kept.rig.pipeline.writer.lender
    assert lender
    block = lender.block(lender.shared.memory.nbytes * 2 // 3)
    assert block is not None
    keeping = asyncio.create_task(kept.keep(128))
    await asyncio.wait([keeping], timeout=0.3)
    assert not keeping.done()
    kept.gate.set()
    (name,) = await keeping
    assert await kept.rig.pipeline.fetch(name)
    kept.gate.clear()
    del block
    (name,) = await kept.keep(160)
    assert kept.rows(name) is not None


async def test_rows_that_are_released_are_never_written(kept: Kept) -> None:
    lender = kept.rig.pipeline.writer.lender
    assert lender
    (name,) = await kept.keep(128)
    assert lender.taken_bytes > 4000
    assert kept.rig.pipeline.references.release(name)
    await until(lambda: lender.taken_bytes == 0)
    assert not kept.rig.written


async def test_several_items_are_answered_before_they_are_written(kept: Kept) -> None:
    names = await kept.keep(128, 160)
    assert all(kept.rows(name) is not None for name in names)
    kept.gate.set()
    for name in names:
        assert await kept.rig.pipeline.fetch(name)


async def test_kept_rows_are_not_lent(kept: Kept) -> None:
    """They outlive the answer, and other processes fetch them."""
    lender = kept.rig.pipeline.writer.lender
    assert lender
    kept.gate.set()
    for is_full in (False, True):
        full = lender.block(lender.shared.memory.nbytes * 2 // 3) if is_full else None
        for width in (128, 64):
            (name,) = await kept.keep(width, lend=True)
            assert await kept.rig.pipeline.fetch(name)
        del full
    assert [len(media) for media in kept.rig.written] == [1] * 4


async def test_kept_rows_are_in_objects_of_their_own(kept: Kept) -> None:
    """Because an object stays as long as one of its embeddings is kept, and each was counted by
    itself."""
    names = await kept.keep(128, 160, 192)
    fetching = [asyncio.create_task(kept.rig.pipeline.fetch(name)) for name in names]
    await asyncio.sleep(0)
    kept.gate.set()
    await asyncio.gather(*fetching)
    assert [len(media) for media in kept.rig.written] == [1] * 3


def test_a_small_item_travels_by_value(kept: Kept) -> None:
    kept.gate.set()

    async def run() -> None:
        (name,) = await kept.keep(64)
        found = await kept.rig.pipeline.fetch(name)
        assert found
        assert isinstance(found.embedding.data, np.ndarray)

    asyncio.run(run())


async def test_a_failed_write_is_told_to_who_fetches(kept: Kept) -> None:
    (name,) = await kept.keep(128)
    kept.failure = MemoryError("full")
    kept.gate.set()
    with pytest.raises(EmbeddingLost, match="full"):
        await kept.rig.pipeline.fetch(name)
    assert await kept.rig.pipeline.fetch(name) is None


def test_rows_that_were_answered_early_do_not_stay(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig.pipeline.writer, "write", partial(RowWriter.write, rig.pipeline.writer))
    lender = rig.pipeline.writer.lender
    assert lender
    packs = threading.Semaphore(2)
    monkeypatch.setattr(rig.gate, "wait", lambda seconds: packs.acquire(timeout=seconds))

    async def run() -> None:
        media = [rig.media(width) for width in (2560, 2560, 2560)]  # a pack each
        parts: list[Reply] = []
        call = rig.pipeline.encode(media, "float32", 60, early=parts.append, lend=True)
        task = asyncio.create_task(call)
        await until(lambda: bool(parts))
        both = lender.taken_bytes  # the second is read back, and waits for the third
        parts.clear()
        await until(lambda: lender.taken_bytes == both // 2)
        assert not task.done()
        packs.release(2)
        await task

    asyncio.run(run())


def test_rows_are_lent_where_the_device_wrote_them(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that must be converted are lent from a copy. What finds no room goes to Ray."""
    monkeypatch.setattr(writing, "INLINE_BYTES", 0)
    writer = rig.pipeline.writer
    monkeypatch.setattr(writer, "write", partial(RowWriter.write, writer))
    lender = writer.lender
    assert lender

    def encoded(dtype: Dtype, *, lend: bool = True) -> tuple[Embedding, bool]:
        """An embedding, and whether its rows can be lent."""
        call = rig.pipeline.encode([rig.media(128)], dtype, 20, lend=lend)
        (answer,) = asyncio.run(call).values()
        assert isinstance(answer, Embedding)
        assert isinstance(answer.data, np.ndarray)
        return answer, lender.holds(answer.data)

    for dtype in ("float32", "bfloat16", "float8_e4m3"):
        lent, there = encoded(dtype)
        assert there
        assert torch.equal(tensor(lent), tensor(encoded(dtype, lend=False)[0]))
        del lent
    asyncio.run(until(lambda: lender.taken_bytes == 0))
    full = lender.block(lender.shared.memory.nbytes)
    assert full is not None
    assert not encoded("float32")[1]
    assert not encoded("bfloat16")[1]


def test_rows_that_a_cache_needs_too_are_written_after_the_answer(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.pipeline.INLINE_BYTES", 0)
    writer = rig.pipeline.writer
    writer.cache.max_bytes = 10**6
    assert writer.lender
    lender = writer.lender

    async def run() -> None:
        (answer,) = (await rig.pipeline.encode([rig.media(128)], "float32", 20, lend=True)).values()
        assert isinstance(answer, Embedding)
        assert isinstance(answer.data, np.ndarray)
        assert lender.holds(answer.data)
        assert (writer.cache.bytes, rig.written) == (0, [])
        await until(lambda: writer.cache.bytes > 0)
        (hit,) = await rig.encode([rig.media(128)], 20)
        assert isinstance(hit, Embedding)
        assert hit.source == "cache"
        assert torch.equal(tensor(hit), tensor(answer))

    asyncio.run(run())


def test_lent_rows_that_only_a_shared_cache_needs_are_not_copied_for_ray(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Cache:
        def __init__(self) -> None:
            self.keys: list[Any] = []

        async def get(self, key: Any, tokens: int | None) -> None: ...

        def put(self, key: Any, embedding: Embedding) -> None:
            self.keys.append(key)

        def close(self) -> None: ...

    for module in ("actors.pipeline", "actors.store.writer"):
        monkeypatch.setattr(f"{module}.INLINE_BYTES", 0)
    monkeypatch.setattr(rig.pipeline.writer, "shared", cache := Cache())
    copied: list[Any] = []
    monkeypatch.setattr(writing, "share_together", lambda arrays, _: copied.append(arrays))

    async def run() -> None:
        (answer,) = (await rig.pipeline.encode([rig.media(128)], "float32", 20, lend=True)).values()
        assert isinstance(answer, Embedding)
        await until(lambda: bool(cache.keys))

    asyncio.run(run())
    rig.pipeline.writer.threads.shutdown()  # after the write
    assert not copied
