"""Items on their way, each encoded once however many callers wait for it.

A flight belongs to no caller: the work goes on while anybody waits, and is given up with the last.
Knows asyncio, but neither replicas nor loads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from actors.telemetry.request_context import ORIGIN, Origin
from actors.types import Answer, Dtype, Media
from router.policy.ledger import Reservation

Key = tuple[tuple[str, ...], Dtype, bool, bool]
"""Identity of an item, dtype of the answer, whether it may stay on the device, and whether its
replica keeps it: what decides its embedding, and where that is."""


def key(media: Media, dtype: Dtype, *, keep: bool) -> Key:
    """Of an item."""
    return media.identity, dtype, media.on_device, keep


@dataclass(slots=True, eq=False)
class Flight:
    """One item from admission to its answer."""

    media: Media
    dtype: Dtype
    reservation: Reservation
    answer: asyncio.Future[Answer]
    deadline: float
    """Of the most patient caller, in seconds of the loop's clock."""
    keep: bool = False
    """Its replica keeps its embedding."""
    given: bool = False
    """A caller has the id under which it is kept."""
    waiting: int = 0
    losses: int = 0
    """Replicas that were lost under it, whoever waited."""
    lone_deaths: int = 0
    """Of these, replicas that died while they had it in a call of its own."""
    origin: Origin = field(default_factory=ORIGIN.get)
    """The request that was first to want it."""
    carrier: Carrier | None = None
    """Let go of on landing, or it would keep the embeddings of others alive."""

    @property
    def key(self) -> Key:
        """By which others join it."""
        return key(self.media, self.dtype, keep=self.keep)


@dataclass(slots=True, eq=False)
class Carrier:
    """What carries the items of one call: they are given up together or not at all."""

    flights: list[Flight]
    task: asyncio.Task[None]


class Flights:
    """Those in the air."""

    def __init__(self, landed: Callable[[Flight], None]) -> None:
        """`landed` is called once for each, when it has its answer or was given up."""
        self._landed = landed
        self._open: dict[Key, Flight] = {}

    def __len__(self) -> int:
        return len(self._open)

    def get(self, wanted: Key) -> Flight | None:
        """The flight of an identical item."""
        return self._open.get(wanted)

    def open(self, flight: Flight) -> None:
        """Lets others join."""
        self._open[flight.key] = flight

    def join(self, flight: Flight, deadline: float) -> None:
        """One more waits. Each `join` has its `leave`."""
        flight.waiting += 1
        flight.deadline = max(flight.deadline, deadline)

    def leave(self, flight: Flight) -> None:
        """One fewer waits. With the last of a whole call, the call is cancelled.

        An item that nobody waits for stays where it is, and can be joined again, as long as
        another item keeps its call alive.
        """
        flight.waiting -= 1
        carrier = flight.carrier
        if carrier is None or any(f.waiting for f in carrier.flights if not f.answer.done()):
            return
        carrier.task.cancel()
        for companion in carrier.flights:
            self.land(companion, None)

    def land(self, flight: Flight, answer: Answer | None) -> None:
        """The end: an answer, or None when nobody wants one. Again is nothing."""
        if flight.answer.done():
            return
        if answer is None:
            flight.answer.cancel()
        else:
            flight.answer.set_result(answer)
        flight.carrier = None
        if self.get(flight.key) is flight:
            del self._open[flight.key]
        self._landed(flight)
