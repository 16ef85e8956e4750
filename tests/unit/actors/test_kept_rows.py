"""The rows of ids in memory that other processes open, from the pipeline to a reader."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from actors import encoder
from actors import pipeline as pipelines
from actors.allocator import aligned
from actors.encoder import KeptRows
from actors.errors import StartError, Unavailable
from actors.options import (
    ActorOptions,
    CacheOptions,
    EncoderOptions,
    GraphOptions,
    ModelOptions,
    ReferenceOptions,
    SharedCacheOptions,
    validated,
)
from actors.pipeline import Pipeline, open_block_memory, open_pipeline
from actors.rows.memory import BlockMemory, open_memory
from actors.rows.reader import RowsReader, RowsRefused
from actors.rows.server import RowsServer
from actors.store import writer as writing
from actors.store.kept import Kept
from actors.store.shared_memory import share_together
from actors.telemetry.metrics import EncoderMetrics
from actors.telemetry.tracing import open_spans
from actors.types import Embedding, Media, SharedBytes, Size
from tests.images import jpeg

CPU = torch.device("cpu")


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Open: rows may be written to the host."""
    gate = threading.Event()

    def put(arrays: Any, most_bytes: int = 0) -> list[Any]:
        assert gate.wait(20)
        return share_together([array.copy() for array in arrays], most_bytes)

    monkeypatch.setattr(writing, "share_together", put)
    gate.set()
    yield gate
    gate.set()


def options(
    device_bytes: int, cache_bytes: int = 0, shared: SharedCacheOptions | None = None
) -> ActorOptions:
    return ActorOptions(
        model=ModelOptions(id="qwen3vl-tiny", load_format="dummy", dtype="float32"),
        encoder=EncoderOptions(device="cpu", num_gpus=0),
        graphs=GraphOptions(mode="off"),
        references=ReferenceOptions(device_bytes=device_bytes),
        cache=CacheOptions(max_bytes=cache_bytes, shared=shared),
    )


def pipeline(
    device_bytes: int = 2**20, cache_bytes: int = 0, shared: SharedCacheOptions | None = None
) -> Pipeline:
    found = options(device_bytes, cache_bytes, shared)
    spans = open_spans(found.tracing, "encoder")
    return open_pipeline(found, EncoderMetrics(), spans, "one")


def media(of: Pipeline, width: int) -> Media:
    spec: Any = of.engine.tower.spec
    return Media("image", jpeg(width, 64), spec.sizing.plan(Size(width, 64)), str(width))


async def keep(of: Pipeline, *widths: int, dtype: Any = "float32") -> list[str]:
    answers = await of.encode([media(of, width) for width in widths], dtype, 20, keep=True)
    names: list[str] = []
    for place in range(len(widths)):
        answer = answers[place]
        assert isinstance(answer, Embedding), answer
        names.append(answer.reference.partition(".")[2])
    return names


async def by_value(of: Pipeline, name: str) -> Tensor:
    kept = await of.fetch(name)
    assert kept
    found = kept.embedding
    assert isinstance(found.data, np.ndarray)
    return torch.from_numpy(found.data).view(getattr(torch, found.dtype)).view(found.shape)


async def in_memory(of: Pipeline, name: str) -> Tensor | None:
    """What another process would copy."""
    held = await of.hold(name)
    assert held
    try:
        if held.memory is None:
            return None
        rows = torch.empty(held.shape, dtype=getattr(torch, held.dtype))
        open_memory(held.memory, CPU).copy(held.offset, rows)
        return rows
    finally:
        of.free(name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_ids_are_in_memory_before_they_are_on_the_host(
    gate: threading.Event, dtype: str
) -> None:
    async def run() -> None:
        gate.clear()
        names = await keep(of, 96, 128, 64, dtype=dtype)
        copies = [await in_memory(of, name) for name in names]
        assert all(copy is not None for copy in copies)
        gate.set()
        for name, copy in zip(names, copies, strict=True):
            assert copy is not None
            assert torch.equal(copy, await by_value(of, name))
        assert of.memory
        assert of.memory.taken_bytes > 0
        for name in names:
            of.references.release(name)
        del copies
        assert of.memory.taken_bytes == 0

    of = pipeline()
    try:
        asyncio.run(run())
    finally:
        of.close()


def test_the_latest_have_room_but_what_is_held_stays(gate: threading.Event) -> None:
    async def run() -> None:
        (held,) = await keep(of, 96)
        rows = await of.hold(held)
        assert rows
        (second,) = await keep(of, 96)
        await by_value(of, second)  # written, so that nothing else needs its block
        (third,) = await keep(of, 128)
        await by_value(of, third)
        found = [await in_memory(of, name) for name in (held, second, third)]
        assert [one is not None for one in found] == [True, False, True]
        again = await of.hold(held)
        assert again == rows, "where it was"
        hold = await of.hold(third)
        (fourth,) = await keep(of, 128)
        assert await in_memory(of, fourth) is None, "no room"
        assert (await by_value(of, fourth)).shape == (8, 192)
        assert hold

    of = pipeline(6 * 192 * 4 + 8 * 192 * 4 + 512)
    try:
        asyncio.run(run())
    finally:
        of.close()


def test_rows_without_a_block_do_not_stay_on_the_device(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else would limit how much of the device's memory they take."""
    monkeypatch.setattr("actors.pipeline.INLINE_BYTES", 0)

    async def run() -> None:
        (held,) = await keep(of, 96)
        assert await of.hold(held)
        gate.clear()
        keeping = asyncio.create_task(keep(of, 64))
        await asyncio.wait([keeping], timeout=0.3)
        assert not keeping.done(), "it is written first"
        gate.set()
        (second,) = await keeping
        assert await in_memory(of, second) is None

    of = pipeline(6 * 192 * 4)
    try:
        asyncio.run(run())
    finally:
        of.close()


def test_ids_of_equal_items_share_a_block(gate: threading.Event) -> None:
    async def run() -> None:
        (first,) = await keep(of, 96)
        await by_value(of, first)
        assert of.memory
        taken = of.memory.taken_bytes
        (second,) = await keep(of, 96)
        assert of.memory.taken_bytes == taken > 0
        one, other = await of.hold(first), await of.hold(second)
        assert one == other
        assert one
        assert one.memory
        half = first.partition(".")[0]
        assert second != first
        assert second.startswith(f"{half}."), "language models cache by it"
        assert await of.hold(half) == one
        expected = await by_value(of, second)
        assert torch.equal(await by_value(of, half), expected)
        assert bytes(await of.rows(half)) == expected.numpy().tobytes()
        of.free(half)
        (narrow,) = await keep(of, 96, dtype="bfloat16")
        assert await in_memory(of, narrow) is None, "the cache has no block of that dtype yet"
        assert not narrow.startswith(half)

    of = pipeline(cache_bytes=2**20)
    try:
        asyncio.run(run())
    finally:
        of.close()


async def filled(of: Pipeline) -> None:
    """Waits until blocks have been filled from the host."""
    async with asyncio.timeout(20):
        while of._filling:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_a_cache_come_into_memory_when_an_id_is_asked_for(dtype: Any) -> None:
    async def run() -> None:
        assert of.memory
        for _ in range(2):
            answer = (await of.encode([media(of, 96)], dtype, 20))[0]
        assert isinstance(answer, Embedding)
        assert answer.source == "cache"
        await filled(of)
        assert of.memory.taken_bytes == 0, "nobody has asked for an id"
        names = [*await keep(of, 96, 96, dtype=dtype), *await keep(of, 96, dtype=dtype)]
        await filled(of)
        (late,) = await keep(of, 96, dtype=dtype)
        expected = await by_value(of, late)
        for name in (*names, late, late.partition(".")[0]):
            copy = await in_memory(of, name)
            assert copy is not None
            assert torch.equal(copy, expected)
        assert of.memory.taken_bytes == aligned(expected.nbytes), "equal items share a block"
        for name in (*names, late):
            of.references.release(name)
        assert of.memory.taken_bytes == 0

    of = pipeline(cache_bytes=2**20)
    try:
        asyncio.run(run())
    finally:
        of.close()


def test_rows_of_a_shared_cache_come_into_memory(tmp_path: Path) -> None:
    async def run() -> None:
        source = ""
        async with asyncio.timeout(20):
            while source != "cache":  # until it was written
                answer = (await of.encode([media(of, 96)], "float32", 20))[0]
                assert isinstance(answer, Embedding)
                source = answer.source
        (name,) = await keep(of, 96)
        await filled(of)
        copy = await in_memory(of, name)
        assert copy is not None
        assert torch.equal(copy, await by_value(of, name))

    of = pipeline(shared=SharedCacheOptions(url=f"file://{tmp_path}"))
    try:
        asyncio.run(run())
    finally:
        of.close()


def test_rows_of_a_cache_move_no_block_that_is_held(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        assert of.memory
        await of.encode([media(of, width) for width in (96, 128)], "float32", 20)
        (first,) = await keep(of, 96)
        await filled(of)
        hold = await of.hold(first)
        assert hold
        (second,) = await keep(of, 128)
        await filled(of)
        assert await in_memory(of, second) is None, "no room"
        assert await of.hold(first) == hold
        of.free(first)
        of.free(first)
        (third,) = await keep(of, 128)
        of.references.release(third)
        await filled(of)
        assert await in_memory(of, first) is None, "the oldest makes room"
        assert await in_memory(of, second) is not None, "equal to the one that was released"
        for name in (first, second):
            of.references.release(name)
        (gone,) = await keep(of, 96)
        of.references.release(gone)
        await filled(of)
        assert of.memory.taken_bytes == 0

        def fail(*_: Any) -> None:
            raise RuntimeError("no device")

        monkeypatch.setattr(of.memory, "fill", fail)
        (last,) = await keep(of, 96)
        await filled(of)
        assert await in_memory(of, last) is None
        assert "no device" in caplog.text
        assert (await by_value(of, last)).shape == (6, 192)

    of = pipeline(8 * 192 * 4, cache_bytes=2**20)
    try:
        asyncio.run(run())
    finally:
        of.close()


def test_pruned_and_too_large_items_have_no_block(gate: threading.Event) -> None:
    async def run() -> None:
        (name,) = await keep(of, 128)
        assert await in_memory(of, name) is None
        (name,) = await keep(of, 64)
        assert await in_memory(of, name) is not None

    of = pipeline(5 * 192 * 4)
    try:
        asyncio.run(run())
    finally:
        of.close()


def test_a_reader_gets_what_a_pipeline_keeps(gate: threading.Event, tmp_path: Path) -> None:
    async def run() -> None:
        kept = KeptRows(of)
        kept.loop = asyncio.get_running_loop()
        server = RowsServer(kept)
        place = server.start(tmp_path / "rows.sock", "127.0.0.1")
        names = await keep(of, 96, 128)

        def read(name: str) -> tuple[Tensor, Tensor]:
            reader = RowsReader.connect(place)
            assert reader
            held = reader.hold(name)
            assert held.memory
            assert (held.model, held.deepstack) == (spec.id, spec.deepstack)
            copied, received = (torch.empty(held.shape) for _ in range(2))
            open_memory(held.memory, CPU).copy(held.offset, copied)
            reader.read(name, received.view(torch.uint8).flatten().numpy().data)
            try:
                reader.hold("x" * 32)
            except RowsRefused:
                reader.close()
                return copied, received
            raise AssertionError("an id that nobody has")

        for name in names:
            expected = await by_value(of, name)
            for rows in await asyncio.to_thread(read, name.partition(".")[0]):
                assert torch.equal(rows, expected)
        await asyncio.to_thread(server.stop)
        held: Any = of.references._holds
        while held:
            await asyncio.sleep(0.01)

    of = pipeline()
    spec = of.engine.tower.spec
    try:
        asyncio.run(run())
    finally:
        of.close()


@pytest.mark.parametrize("written", [True, False])
def test_what_is_taken_need_not_be_written_and_is_released(
    gate: threading.Event, tmp_path: Path, written: bool
) -> None:
    async def run() -> None:
        kept = KeptRows(of)
        kept.loop = asyncio.get_running_loop()
        server = RowsServer(kept)
        place = server.start(tmp_path / "rows.sock", "127.0.0.1")
        if not written:
            gate.clear()
        names = await keep(of, 96, 128)
        expected = [await in_memory(of, name) for name in names]

        def take(name: str, like: Tensor) -> Tensor:
            reader = RowsReader.connect(place)
            assert reader
            received = torch.empty_like(like)
            memory = received.view(torch.uint8).flatten().numpy().data
            first, again = reader.take([(name, memory), (name, memory)])
            assert first is None
            assert "released" in str(again)
            reader.close()
            return received

        for name, rows in zip(names, expected, strict=True):
            assert rows is not None
            if written:
                await by_value(of, name)
            assert torch.equal(await asyncio.to_thread(take, name, rows), rows)
            assert await of.fetch(name) is None
        gate.set()
        await asyncio.to_thread(server.stop)
        assert of.references.bytes == 0

    of = pipeline()
    try:
        asyncio.run(run())
    finally:
        of.close()


def test_an_object_is_opened_once_and_forgotten_with_its_last_entry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[object] = []

    async def arrays(data: SharedBytes) -> list[Any]:
        opened.append(data.object_ref)
        return [np.full(4, place, np.uint8) for place in range(2)]

    monkeypatch.setattr(pipelines, "arrays", arrays)

    async def run() -> None:
        answer = (await of.encode([media(of, 96)], "float32", 20))[0]
        assert isinstance(answer, Embedding)
        shared = [SharedBytes("reference", 4, place, 4) for place in range(2)]
        kept = [Kept.of(media(of, 96), replace(answer, data=data)) for data in shared]
        names = [of.references.keep(one, monotonic()) for one in kept]
        for place, name in enumerate(names):
            rows = await of.take(name)
            assert rows is not None
            assert set(rows) == {place}
            of.references.release(name)
            of.free(name)
        assert opened == ["reference"]
        assert not of.references.opened

    of = pipeline()
    try:
        asyncio.run(run())
    finally:
        of.close()


def test_what_is_taken_too_late_stays(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader, who was told so, asks the front door."""

    async def run() -> None:
        kept = KeptRows(of)
        kept.loop = asyncio.get_running_loop()
        gate.clear()
        (name,) = await keep(of, 96, dtype="bfloat16")
        monkeypatch.setattr(encoder, "KEPT_ROWS_SECONDS", 0.05)
        with pytest.raises(Unavailable, match="did not answer"):
            await asyncio.to_thread(kept.take, name)
        gate.set()
        assert (await by_value(of, name)).shape == (6, 192)
        held: Any = of.references._holds
        async with asyncio.timeout(20):
            while held:
                await asyncio.sleep(0.01)
        assert await of.fetch(name)

    of = pipeline()
    try:
        asyncio.run(run())
    finally:
        of.close()


def test_rows_that_leave_the_device_in_fp8_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelines, "INLINE_BYTES", 0)  # so that it is written after the answer

    async def run() -> None:
        for _ in range(2):
            (name,) = await keep(of, 96, dtype="float8_e4m3")
            kept = await of.fetch(name)
            assert kept
            found: Any = kept.embedding
            assert (found.data.size, len(found.scales)) == (6 * 192, 6 * 4)

    of = pipeline(0)
    try:
        asyncio.run(run())
    finally:
        of.close()


def test_a_write_that_fails_is_told_to_its_reader(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def put(*_: Any) -> list[Any]:
        raise MemoryError("full")

    monkeypatch.setattr(writing, "share_together", put)

    async def run() -> None:
        kept = KeptRows(of)
        kept.loop = asyncio.get_running_loop()
        (name,) = await keep(of, 96, dtype="bfloat16")
        assert await asyncio.to_thread(kept.hold, name)
        with pytest.raises(Exception, match="could not be written"):
            await asyncio.to_thread(kept.rows, name)
        kept.free(name)
        await asyncio.sleep(0.01)
        assert await of.hold(name) is None

    of = pipeline()
    try:
        asyncio.run(run())
    finally:
        of.close()


def test_memory_that_the_device_lacks_is_a_start_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(size_bytes: int, device: torch.device) -> BlockMemory:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(BlockMemory, "on_gpu", full)
    with pytest.raises(StartError, match=r"references\.device_bytes is 1000"):
        open_block_memory(options(1000), torch.device("cuda"))
    assert open_block_memory(options(0), CPU) is None


def test_more_than_the_whole_gpu_memory_is_refused() -> None:
    values = {
        "model": {"id": "qwen3vl-tiny", "load_format": "dummy"},
        "encoder": {"gpu_memory_bytes": 1000},
        "references": {"device_bytes": 1000},
    }
    with pytest.raises(StartError, match=r"references\.device_bytes is 1000, of the 1000"):
        validated(ActorOptions, values)
