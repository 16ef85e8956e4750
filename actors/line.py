"""Calls that come over sockets from routers on the encoder's node, past Ray.

A call of Ray's to an encoder takes three to four milliseconds there and back, one of these half a
millisecond (BENCHMARKS.md). To Serve they are no calls: whoever owns them waits for them before it
stops.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from actors.errors import ServiceError, Unavailable
from actors.line_messages import Call, asked_of, told_bytes
from actors.messages import Messages, listen
from actors.store.shared_memory import here
from actors.types import Embedding, Reply

log = logging.getLogger("ray.serve")

Encode = Callable[[Call], Awaitable[Reply]]


class Lines:
    """All that are open to one encoder. For its event loop."""

    def __init__(self, encode: Encode) -> None:
        self.encode = encode
        self.address = ""
        """Where routers of this node reach it, once it is opened."""
        self._server: asyncio.Server | None = None
        self._lines: set[Line] = set()
        self._closing = False

    async def open(self) -> str:
        """The address; the first time, it is opened."""
        if not self.address:
            listening, self.address = listen()
            loop = asyncio.get_running_loop()
            self._server = await loop.create_unix_server(self._line, sock=listening)
        return self.address

    async def close(self) -> None:
        """Takes no more calls, and waits for those that there are."""
        self._closing, self.address = True, ""
        if self._server:
            self._server.close()
        while tasks := [task for line in self._lines for task in line.tasks.values()]:
            await asyncio.wait(tasks)
        for line in self._lines:
            line.messages.close()

    async def outcome(self, call: Call) -> Reply | Exception:
        """Of a call, with rows that can be sent."""
        if self._closing:
            return Unavailable("this encoder is stopping: try again")
        try:
            reply = await self.encode(call)
            answers = [
                await here(one) if isinstance(one, Embedding) else one for one in reply.answers
            ]
        except Exception as error:
            if not isinstance(error, ServiceError):
                log.error("a call over a line failed", exc_info=error)
            return error
        return Reply(answers, reply.outstanding_patches)

    def _line(self) -> Messages:
        line = Line(self)
        self._lines.add(line)
        return line.messages

    def ended(self, line: Line) -> None:
        """A router went away."""
        self._lines.discard(line)


class Line:
    """One router's."""

    def __init__(self, lines: Lines) -> None:
        self.lines = lines
        self.messages = Messages(self.heard, self.ended)
        self.tasks: dict[int, asyncio.Task[None]] = {}
        """Calls by their numbers."""

    def heard(self, message: bytes) -> None:
        """A call, or that nobody waits for one any more."""
        asked = asked_of(message)
        if asked.call is None:
            if task := self.tasks.get(asked.number):
                task.cancel()
            return
        task = asyncio.get_running_loop().create_task(self.answer(asked.number, asked.call))
        self.tasks[asked.number] = task
        task.add_done_callback(partial(self.answered, asked.number))

    async def answer(self, number: int, call: Call) -> None:
        """One call."""
        outcome = await self.lines.outcome(call)
        try:
            message = told_bytes(number, outcome)
        except Exception as error:
            log.exception("an answer that does not go over a line. This is a bug.")
            message = told_bytes(number, error)
        self.messages.send(message)

    def answered(self, number: int, task: asyncio.Task[None]) -> None:
        """It is over, in any way. Whoever waits for one that gave itself up is told so."""
        del self.tasks[number]
        if task.cancelled() or task.exception():
            self.messages.send(told_bytes(number, Unavailable("the encoder gave the call up")))

    def ended(self) -> None:
        """Nobody waits for anything."""
        for task in self.tasks.values():
            task.cancel()
        self.lines.ended(self)
