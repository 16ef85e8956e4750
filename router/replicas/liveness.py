"""Which replicas still answer, found out by asking those that have been quiet with work of ours.

A call may take long because there is much to do; a process that hangs answers nothing at all, and
Serve takes a while to replace it. Knows asyncio, but neither items nor loads.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from contextvars import Context

from router.replicas.fleet import ShardLost


class Watch:
    """Over the calls of one router."""

    def __init__(self, ask: Callable[[str], Awaitable[None]], stall_seconds: float) -> None:
        """`ask` returns if the replica is well. Half of the time to be quiet, half to be asked."""
        self.silent: set[str] = set()
        """Replicas that have been asked and have not answered yet."""
        self._ask = ask
        self._half_seconds = stall_seconds / 2
        self._calls: defaultdict[str, set[asyncio.Timeout]] = defaultdict(set)
        self._heard: dict[str, float] = {}
        """Replicas with calls, by when they last answered one, or got the first."""
        self._asking: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def over(self, replica: str) -> AsyncIterator[None]:
        """Around a call: cancels it and raises ShardLost when the replica does not answer."""
        loop = asyncio.get_running_loop()
        limit = asyncio.timeout(self._half_seconds if replica in self.silent else None)
        self._calls[replica].add(limit)
        if replica not in self._heard:
            self._heard[replica] = loop.time()
            self._look_later(replica, self._half_seconds)
        try:
            async with limit:
                yield
            self._heard[replica] = loop.time()
        except TimeoutError as error:
            raise ShardLost("it does not answer") from error
        finally:
            self._calls[replica].discard(limit)

    def _look_later(self, replica: str, seconds: float) -> None:
        # A context of its own: in a request's, Serve would cancel the question with the request.
        loop = asyncio.get_running_loop()
        loop.call_later(seconds, self._look, replica, context=Context())

    def _look(self, replica: str) -> None:
        """Asks a replica that has been quiet for long enough; forgets one without calls."""
        loop = asyncio.get_running_loop()
        if not self._calls[replica]:
            del self._calls[replica], self._heard[replica]
        elif (left := self._heard[replica] + self._half_seconds - loop.time()) > 0:
            self._look_later(replica, left)
        else:
            task = loop.create_task(self._question(replica))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    async def _question(self, replica: str) -> None:
        """Its calls are lost if it does not answer in time; it is silent until it answers."""
        loop = asyncio.get_running_loop()
        answer = asyncio.ensure_future(self._ask(replica))
        await asyncio.wait([answer], timeout=self._half_seconds)
        if not answer.done() or answer.exception():
            self.silent.add(replica)
            for call in self._calls[replica]:
                if not call.expired():
                    call.reschedule(loop.time())
            with suppress(Exception):  # that it fails is an answer
                await answer
            self.silent.discard(replica)
        self._heard[replica] = loop.time()
        self._look_later(replica, self._half_seconds)
