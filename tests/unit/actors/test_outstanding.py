"""The load that an encoder tells routers, the autoscaler and Serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from actors.encoder import Encoder
from actors.options import TracingOptions
from actors.telemetry.tracing import open_spans
from actors.types import Answer, Media, Reply, Work
from tests.unit.fleet import embedding, item


def test_what_was_answered_early_is_not_outstanding() -> None:
    """Routers do not count it either: they would take it for the work of other routers."""

    class Parts:
        async def encode(
            self, media: Sequence[Media], *_: Any, early: Callable[[Reply], None], **__: Any
        ) -> dict[int, Answer]:
            early(Reply([embedding(media[1], "a")], 0, 0, (1,)))
            during.append(encoder.outstanding)
            await asyncio.sleep(0)
            return {0: embedding(media[0], "a")}

    spans = open_spans(TracingOptions(), "encoder")
    encoder: Any = SimpleNamespace(
        pipeline=Parts(), spans=spans, replica="a", outstanding=Work(7), waiting=Work(0)
    )
    media, during, parts = [item(0, 100), item(1, 400)], list[Work](), list[Reply]()
    reply = asyncio.run(Encoder.encode(encoder, media, "bfloat16", 5, early=parts.append))
    assert [one.patches for one in during] == [7 + 100]
    assert [part.places for part in parts] == [(1,)]
    assert (reply.places, reply.outstanding_patches, encoder.outstanding) == ((0,), 7, Work(7))
