"""Which rows an encoder leaves on its device, with a memory for them that needs no NIXL."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from threading import Lock
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from ray import serve
from torch import Tensor

from actors import encoder
from actors.store import writer
from actors.store.nixl import DeviceMemory
from actors.types import Embedding, Media, SharedBytes, Size
from tests.images import jpeg
from tests.unit.store.test_encoder_hits import OPTIONS


class Memory:
    """As nixl.DeviceMemory, with room for one item."""

    def __init__(self) -> None:
        self.held: list[Tensor] = []
        self._lock = Lock()  # rows are written in several threads

    def put(self, rows: Tensor, dtype: torch.dtype) -> SharedBytes | None:
        with self._lock:
            if self.held:
                return None
            self.held.append(rows.to(dtype))
            return SharedBytes("a reference", self.held[0].nbytes)


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> encoder.Encoder:
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="one"))
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(writer, "INLINE_BYTES", 2000)  # of 384 a row
    graphs = OPTIONS.graphs.model_copy(update={"mode": "off"})
    actor = encoder.Encoder(OPTIONS.model_copy(update={"graphs": graphs}))
    actor.pipeline.writer.memory = cast(DeviceMemory, Memory())
    return actor


def media(actor: encoder.Encoder, width: int, **others: Any) -> Media:
    plan = actor.pipeline.engine.tower.spec.sizing.plan(Size(width, 64))
    return Media("image", jpeg(width, 64), plan, str(width), **others)


def encode(actor: encoder.Encoder, media: Sequence[Media], dtype: Any) -> list[Embedding]:
    answers = asyncio.run(actor.encode(list(media), dtype, 30)).answers
    return [one for one in answers if isinstance(one, Embedding)]


def test_large_rows_stay_for_those_who_can_read_them_while_there_is_room(
    actor: encoder.Encoder,
) -> None:
    asked = media(actor, 96, on_device=True)
    small = media(actor, 64, on_device=True)
    (stayed,) = encode(actor, [asked], "float16")
    assert isinstance(stayed.data, SharedBytes)
    assert (stayed.data.size_bytes, stayed.shape[0]) == (6 * 192 * 2, 6)
    (again,) = encode(actor, [replace(asked, on_device=False)], "float16")
    assert again.source == "cache", "which holds rows of its own"
    assert isinstance(again.data, np.ndarray)
    memory = cast(Any, actor.pipeline.writer.memory)
    assert again.data.tobytes() == memory.held.pop().numpy().tobytes()
    host = media(actor, 128)
    room = media(actor, 160, on_device=True)
    none = media(actor, 192, on_device=True)
    found = encode(actor, [small, host, room, none], "float16")
    assert [isinstance(one.data, SharedBytes) for one in found].count(True) == 1
    assert not any(isinstance(one.data, SharedBytes) for one in found[:2])
    assert [one.shape[0] for one in found] == [4, 8, 10, 12]
    actor.pipeline.close()
