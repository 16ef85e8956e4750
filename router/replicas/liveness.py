"""Which replicas still answer.

A call may take long because there is much to do, but a process that hangs answers nothing, and
Serve takes a while to replace it. So a replica that has been quiet for half of `stall_seconds`
while it has calls of ours is asked for its health. If no answer comes in the other half, or a bad
one, its calls are lost, and it gets no new ones until it answers.

Knows asyncio, but neither items nor loads.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import Context

from router.replicas.fleet import ShardLost


class Liveness:
    """Watches the replicas that have calls of one router."""

    def __init__(self, check: Callable[[str], Awaitable[None]], stall_seconds: float) -> None:
        """`check` returns if the replica is healthy."""
        self.silent: set[str] = set()
        """Replicas that have been asked and have not answered yet."""
        self._check = check
        self._half_seconds = stall_seconds / 2
        self._calls: defaultdict[str, set[asyncio.Timeout]] = defaultdict(set)
        self._answered_at: dict[str, float] = {}
        """When each replica with calls last answered one, or got the first."""
        self._checking: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def guard(self, replica: str) -> AsyncIterator[None]:
        """Around a call: cancels it and raises ShardLost when the replica does not answer."""
        loop = asyncio.get_running_loop()
        limit = asyncio.timeout(self._half_seconds if replica in self.silent else None)
        self._calls[replica].add(limit)
        if replica not in self._answered_at:
            self._answered_at[replica] = loop.time()
            self._look_in(replica, self._half_seconds)
        try:
            async with limit:
                yield
            self._answered_at[replica] = loop.time()
        except TimeoutError as error:
            raise ShardLost("it does not answer") from error
        finally:
            self._calls[replica].discard(limit)

    def _look_in(self, replica: str, seconds: float) -> None:
        # A context of its own: in a request's, Serve would cancel the check with the request.
        loop = asyncio.get_running_loop()
        loop.call_later(seconds, self._look, replica, context=Context())

    def _look(self, replica: str) -> None:
        """Checks a replica that has been quiet for long enough; forgets one without calls."""
        loop = asyncio.get_running_loop()
        if not self._calls[replica]:
            del self._calls[replica], self._answered_at[replica]
        elif (left := self._answered_at[replica] + self._half_seconds - loop.time()) > 0:
            self._look_in(replica, left)
        else:
            task = loop.create_task(self._check_health(replica))
            self._checking.add(task)
            task.add_done_callback(self._checking.discard)

    async def _check_health(self, replica: str) -> None:
        loop = asyncio.get_running_loop()
        answer = asyncio.ensure_future(self._check(replica))
        await asyncio.wait([answer], timeout=self._half_seconds)
        if not answer.done() or answer.cancelled() or answer.exception():
            self.silent.add(replica)
            for call in self._calls[replica]:
                if not call.expired():
                    call.reschedule(loop.time())
            await asyncio.wait([answer])
            answer.cancelled() or answer.exception()  # a failure is an answer, too
            self.silent.discard(replica)
        self._answered_at[replica] = loop.time()
        self._look_in(replica, self._half_seconds)
