"""Rows that are kept: written behind the answer where they are few."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.families.registry import read
from actors.options import ModelOptions
from actors.store import sharing
from actors.store.cache import EmbeddingCache, Entry
from actors.store.sharing import MOST_BEHIND_BYTES, Sharing, Writing, written
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Bytes, Embedding, Media, SharedBytes, Timings
from tests.unit.fleet import item

SPEC = read(ModelOptions(id="qwen3vl-tiny", load_format="dummy", dtype="float32"))
ROWS = torch.arange(4096.0).reshape(32, 128)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """In the place of Ray's memory, which is full of nothing and open while this is set."""
    gate = threading.Event()

    def put(arrays: Sequence[Bytes], most_bytes: int = 0) -> list[Bytes | SharedBytes]:
        assert gate.wait(10)
        return list(arrays)

    monkeypatch.setattr(sharing, "share_together", put)
    monkeypatch.setattr(sharing, "INLINE_BYTES", 1000)
    yield gate
    gate.set()


def shared(cache_max_bytes: int = 0) -> Sharing:
    return Sharing(SPEC, EmbeddingCache(cache_max_bytes, EncoderMetrics()), None, 0)


def embedding(entry: Entry) -> Embedding:
    return Embedding(entry.data, entry.dtype, entry.shape, (1, 2, 2), "graph", Timings(0, 0, 0))


def is_behind(entry: Entry) -> bool:
    return isinstance(entry.data, SharedBytes) and isinstance(entry.data.object_ref, Writing)


def test_an_answer_does_not_wait_for_what_is_written_behind_it(gate: threading.Event) -> None:
    both = shared()
    (entry,) = both.share_behind("float32", [(item(1), ROWS)])
    assert is_behind(entry)
    assert (entry.shape, entry.dtype) == ((32, 128), "float32")
    assert isinstance(entry.data, SharedBytes)
    assert entry.data.object_bytes == ROWS.nbytes

    async def read_twice() -> None:
        given_up = asyncio.create_task(written(embedding(entry)))
        await asyncio.sleep(0)
        given_up.cancel()
        gate.set()
        data = (await written(embedding(entry))).data
        assert isinstance(data, np.ndarray)
        assert data.tobytes() == ROWS.numpy().tobytes()

    asyncio.run(read_twice())
    both.close()


def test_one_at_a_time_is_written_behind(gate: threading.Event) -> None:
    both = shared()
    first = both.share_behind("float32", [(item(1), ROWS)])
    released = threading.Timer(0.1, gate.set)
    released.start()
    second = both.share_behind("float32", [(item(2), ROWS)])
    assert is_behind(first[0])
    assert not is_behind(second[0]), "it waited"
    asyncio.run(written(embedding(first[0])))
    with both._idle:  # given back
        pass
    assert is_behind(both.share_behind("float32", [(item(3), ROWS)])[0])
    both.close()


def test_a_call_of_several_is_written_first(gate: threading.Event) -> None:
    """One entry that is kept would hold the others of its call."""
    gate.set()
    both = shared()
    entries = both.share_behind("float32", [(item(1), ROWS), (item(2), ROWS)])
    assert not any(map(is_behind, entries))
    both.close()


@pytest.mark.parametrize(
    ("media", "rows"),
    [
        (item(1), ROWS[:1]),
        (item(1), torch.zeros(MOST_BEHIND_BYTES // 512 + 1, 128)),
        (Media("image", b"", item(1).plan, "x", on_device=True), ROWS),
    ],
    ids=["small", "large", "on the device"],
)
def test_others_are_written_first(gate: threading.Event, media: Media, rows: Tensor) -> None:
    gate.set()
    both = shared()
    (entry,) = both.share_behind("float32", [(media, rows)])
    assert not is_behind(entry)
    both.close()


def test_what_cannot_be_written_says_so_when_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(arrays: Sequence[Bytes], most_bytes: int = 0) -> Any:
        raise MemoryError("full")

    monkeypatch.setattr(sharing, "share_together", full)
    monkeypatch.setattr(sharing, "INLINE_BYTES", 1000)
    both = shared()
    (entry,) = both.share_behind("float32", [(item(1), ROWS)])
    with pytest.raises(MemoryError):
        asyncio.run(written(embedding(entry)))
    both.close()
