"""Items in flight: identical ones are encoded once, however many requests wait for them.

An item in flight belongs to no request: it goes on while any request waits for it. Knows asyncio,
but neither replicas nor loads.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from actors.telemetry.tracing import ORIGIN, Origin
from actors.types import Answer, Dtype, Media
from router.policy.ledger import Reservation

Key = tuple[tuple[str, ...], Dtype, bool]
"""What decides an embedding and where it is: the item's identity, the dtype, and whether the rows
may stay on the device."""


def key(media: Media, dtype: Dtype) -> Key:
    return media.identity, dtype, media.on_device


@dataclass(slots=True, eq=False)
class InFlightItem:
    """One item from its admission to its answer."""

    media: Media
    dtype: Dtype
    reservation: Reservation
    answer: asyncio.Future[Answer]
    deadline: float
    """Of the most patient request, in seconds of the loop's clock."""
    keep: bool = False
    """Its replica keeps its embedding, under an id that is one request's alone."""
    waiting: int = 0
    """Requests that wait for it; a request counts once for each of its places."""
    losses: int = 0
    """Replicas that were lost while they had it."""
    lone_deaths: int = 0
    """Of these, replicas that died while it was the only item of its call."""
    origin: Origin = field(default_factory=ORIGIN.get)
    """The request that asked for it first."""
    call: ShardCall | None = None
    """Dropped with the answer, or it would keep the embeddings of others alive."""

    @property
    def key(self) -> Key:
        return key(self.media, self.dtype)


@dataclass(slots=True, eq=False)
class ShardCall:
    """One call to a replica. Its items are cancelled together or not at all."""

    items: list[InFlightItem]
    task: asyncio.Task[None]

    @property
    def wanted(self) -> bool:
        return any(item.waiting for item in self.items if not item.answer.done())
