"""Calls to an encoder on this node, over a socket past Ray: a seventh of the time.

Small ones alone: what is large goes through Ray's shared memory. A line is opened at the first
call to a replica; until it is open, where there is none, and for good where one broke, calls go by
Ray. What else is asked of a replica (`keep_again`, `fetch`, `release`) always does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping
from contextlib import suppress
from itertools import count
from typing import Any

from actors.errors import ServiceError
from actors.line_messages import Asked, Call, asked_bytes, told_of
from actors.messages import Messages, connect
from actors.store.shared_memory import INLINE_BYTES
from actors.types import DTYPE_BYTES, Reply
from router.replicas.fleet import ReplicaDied

MOST_UNSENT_BYTES = 4 * INLINE_BYTES


class Line:
    """To one replica. `calls` are answered in any order."""

    def __init__(self) -> None:
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._messages = Messages(self._heard, self._ended)
        self._retired = False

    @property
    def open(self) -> bool:
        """It takes calls: not those that a process which hangs would let pile up."""
        return not self._messages.closing and self._messages.unsent_bytes <= MOST_UNSENT_BYTES

    async def begin(self, address: str) -> None:
        """Opens it, if anybody listens there."""
        if connecting := connect(address):
            loop = asyncio.get_running_loop()
            with suppress(OSError):  # it ended meanwhile
                await loop.create_unix_connection(lambda: self._messages, sock=connecting)
        if self._retired:
            self.retire()

    def call(self, call: Call) -> LineCall:
        """Sent at once. For one that is open."""
        number = next(self._numbers)
        message = asked_bytes(Asked(number, call))
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._messages.send(message)
        return LineCall(self, number, answer)

    def give_up(self, number: int) -> None:
        """Nobody waits for it."""
        if self._waiting.pop(number, None):
            self._messages.send(asked_bytes(Asked(number)))
        if self._retired:
            self.retire()

    def retire(self) -> None:
        """No more calls; it is closed once those that there are have their answers."""
        self._retired = True
        if not self._waiting:
            self._messages.close()

    def _heard(self, message: bytes) -> None:
        number, outcome = told_of(message)
        answer = self._waiting.pop(number, None)
        if answer is None or answer.done():
            return  # it was given up
        if isinstance(outcome, ServiceError):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)
        if self._retired:
            self.retire()

    def _ended(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            if not answer.done():
                answer.set_exception(ReplicaDied("the line to it broke"))


class LineCall:
    """One call, begun. Awaited as what a handle gives."""

    def __init__(self, line: Line, number: int, answer: asyncio.Future[Reply]) -> None:
        self._line = line
        self._number = number
        self._answer = answer

    def __await__(self) -> Generator[Any, None, Reply]:
        return self._answer.__await__()

    def cancel(self) -> None:
        """Nobody waits any more."""
        self._line.give_up(self._number)


class Lines:
    """To all replicas that are near. For one event loop."""

    def __init__(self) -> None:
        self._lines: dict[str, Line] = {}
        self._opening: set[asyncio.Task[None]] = set()

    def to(self, replica: str, metadata: Mapping[str, Any]) -> Line | None:
        """If it is open. The first time it is opened meanwhile."""
        line = self._lines.get(replica)
        if line is None and (address := metadata.get("line")):
            self._lines[replica] = line = Line()
            task = asyncio.get_running_loop().create_task(line.begin(address))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
        return line if line and line.open else None

    def keep(self, replicas: Mapping[str, object]) -> None:
        """Those of replicas that are gone retire: one that is drained still answers."""
        for gone in self._lines.keys() - replicas.keys():
            self._lines.pop(gone).retire()


def fits(call: Call, metadata: Mapping[str, Any]) -> bool:
    """Whether a call and its answer are few enough bytes, of which none stay on the device."""
    if any(item.on_device for item in call.media):
        return False
    asked = sum(len(data) for item in call.media for data in (item.data, *item.frames))
    tokens = 0 if call.keep else sum(item.plan.tokens for item in call.media)
    answer = tokens * metadata.get("width", 0) * DTYPE_BYTES[call.dtype]
    return bool(max(asked, answer) <= INLINE_BYTES)
