"""Rows that left the engine: written together, pruned, cached, left on the device."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.families.registry import read
from actors.kernels.gemm.fp8 import quantised
from actors.options import ModelOptions
from actors.store import writer
from actors.store.kept import OVERHEAD_BYTES, EmbeddingCache, Kept
from actors.store.writer import RowBatch, RowWriter
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Bytes, Dtype, Item, SharedBytes
from tests.unit.fleet import item

SPEC = read(ModelOptions(id="qwen3vl-tiny", load_format="dummy", dtype="float32"))
ROWS = torch.arange(32.0 * SPEC.width).reshape(32, SPEC.width)


def row_writer(cache_max_bytes: int = 0) -> RowWriter:
    return RowWriter(SPEC, EmbeddingCache(cache_max_bytes, EncoderMetrics()), None, 0, "one")


def encoded(rows: Tensor = ROWS) -> Item:
    return Item(item(1).plan, np.empty(0, np.uint8), rows=rows)


def test_rows_that_arrive_while_others_are_written_are_written_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, writes = threading.Event(), []

    def put(arrays: Sequence[Bytes], most_bytes: int = 0) -> list[Bytes | SharedBytes]:
        writes.append(len(arrays))
        assert gate.wait(10)
        return list(arrays)

    monkeypatch.setattr(writer, "share_together", put)
    one = row_writer()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        blocked = [loop.run_in_executor(one.threads, gate.wait, 10) for _ in range(writer.WRITERS)]
        batch = RowBatch(one, "float32")
        items = [encoded(ROWS + number) for number in range(5)]
        waiting = [asyncio.create_task(batch.write(item(n), i)) for n, i in enumerate(items)]
        await asyncio.sleep(0)
        waiting[1].cancel()  # the others get theirs nevertheless
        gate.set()
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert writes == [5]
        assert isinstance(found[1], asyncio.CancelledError)
        for number in (0, 2, 3, 4):
            made: Any = found[number]
            assert (made.dtype, made.replica) == ("float32", "one")
            assert made.data.tobytes() == (ROWS + number).numpy().tobytes()
        assert (await batch.write(item(9), encoded())).shape[0] == 32, "a second write"
        assert writes == [5, 1]
        await asyncio.gather(*blocked)

    asyncio.run(run())
    one.close()


def test_what_cannot_be_written_fails_its_own_call_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(arrays: Sequence[Bytes], most_bytes: int = 0) -> Any:
        raise MemoryError("full")

    one = row_writer()

    async def run() -> None:
        batch = RowBatch(one, "float32")
        with monkeypatch.context() as broken:
            broken.setattr(writer, "share_together", full)
            with pytest.raises(MemoryError):
                await batch.write(item(1), encoded())
        assert (await batch.write(item(1), encoded())).shape[0] == 32

    asyncio.run(run())
    one.close()


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3"])
def test_the_cache_has_rows_in_the_models_dtype(dtype: Dtype) -> None:
    one = row_writer(10**6)
    assert not one.leaves_in_fp8(item(1), dtype)
    (made,) = one.write(dtype, [(item(1), encoded())])
    cached = one.cache.get(one.key(item(1)), 32)
    assert cached
    assert (made.dtype, cached.dtype, cached.scales) == (dtype, "float32", b"")
    assert len(made.scales) == (32 * 4 if dtype == "float8_e4m3" else 0)
    hit = asyncio.run(writer.converted(cached, dtype))
    assert torch.equal(writer.tensor(hit), writer.tensor(made))
    assert isinstance(cached.data, np.ndarray)
    assert cached.data.tobytes() == ROWS.numpy().tobytes()
    one.close()


def test_rows_in_fp8_are_written_as_they_left_the_device() -> None:
    one = row_writer()
    given = item(1)
    left = Item(given.plan, np.empty(0, np.uint8), in_fp8=True, rows=quantised(ROWS))
    assert one.leaves_in_fp8(given, "float8_e4m3")
    assert not one.leaves_in_fp8(given, "float32")
    assert not one.leaves_in_fp8(replace(given, evs_rate=0.5), "float8_e4m3")
    (made,) = one.write("float8_e4m3", [(given, left)])
    (late,) = one.write("float8_e4m3", [(given, encoded())])
    assert (made.dtype, made.shape, made.size_bytes) == ("float8_e4m3", ROWS.shape, ROWS.numel())
    assert made.scales == late.scales
    assert torch.equal(writer.tensor(made), quantised(ROWS).float())
    assert torch.equal(writer.tensor(late), writer.tensor(made))
    one.close()


def test_scales_count_as_memory_of_what_is_kept() -> None:
    one = row_writer()
    (made,) = one.write("float8_e4m3", [(item(1), encoded())])
    assert Kept.of(item(1), made).size_bytes == ROWS.numel() + 32 * 4 + OVERHEAD_BYTES
    one.close()
