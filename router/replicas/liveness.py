"""Detects replicas that no longer answer.

A call may take long because there is much to do, but a process that hangs answers nothing, and
Serve takes a while to replace it. Therefore a replica that has calls of ours and has been quiet for
half of `stall_seconds` gets a health check. If it does not pass within the other half, its calls
are lost, and it gets no new ones until it answers.

A node that is cut off or gone is noticed sooner, because its kernel accepts no connection, whereas
the kernel of a running node does, even for a process that is busy or hangs.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from router.replicas.fleet import ShardLost, detached

PROBE_SECONDS = 0.5
"""How often the node of a replica that is quiet is probed."""
REACH_SECONDS = 1.5
"""How long a probe may take. TCP retransmits a lost first packet after 1 s."""


class Liveness:
    """Watches the replicas that have calls of one router."""

    def __init__(
        self,
        check: Callable[[str], Awaitable[None]],
        reach: Callable[[str], Awaitable[None]],
        stall_seconds: float,
    ) -> None:
        """`check` returns if the replica is healthy, `reach` if its node answers."""
        self.silent: set[str] = set()
        """Replicas that did not answer a health check in time, and have not answered since."""
        self._check = check
        self._reach = reach
        self._half_seconds = stall_seconds / 2
        self._calls: defaultdict[str, set[asyncio.Timeout]] = defaultdict(set)
        self._answered_at: dict[str, float] = {}
        """When each watched replica last answered a call, or got its first one."""
        self._watches: dict[str, asyncio.Task[None]] = {}

    @asynccontextmanager
    async def guard(self, replica: str) -> AsyncIterator[None]:
        """Wraps a call. Cancels it and raises ShardLost if the replica does not answer."""
        loop = asyncio.get_running_loop()
        limit = asyncio.timeout(self._half_seconds if replica in self.silent else None)
        self._calls[replica].add(limit)
        if replica not in self._watches:
            self._answered_at[replica] = loop.time()
            self._watches[replica] = detached(self._watch(replica))
        try:
            async with limit:
                yield
            self._answered_at[replica] = loop.time()
        except TimeoutError as error:
            raise ShardLost("it does not answer") from error
        finally:
            self._calls[replica].discard(limit)

    async def _watch(self, replica: str) -> None:
        """Checks a replica whenever it has been quiet for long enough, until it has no calls."""
        loop = asyncio.get_running_loop()
        while self._calls[replica]:
            answered_at = self._answered_at[replica]
            left = answered_at + self._half_seconds - loop.time()
            if left <= 0:
                await self._check_health(replica, self._half_seconds)
                self._answered_at[replica] = loop.time()
                continue
            await asyncio.sleep(min(left, PROBE_SECONDS))
            if self._answered_at[replica] != answered_at or await self._reachable(replica):
                continue
            if self._answered_at[replica] == answered_at:
                await self._check_health(replica, 0)
                self._answered_at[replica] = loop.time()
        del self._calls[replica], self._answered_at[replica], self._watches[replica]

    async def _reachable(self, replica: str) -> bool:
        try:
            async with asyncio.timeout(REACH_SECONDS):
                await self._reach(replica)
        except OSError:  # TimeoutError included
            return False
        return True

    async def _check_health(self, replica: str, wait_seconds: float) -> None:
        """Ends the replica's calls if it does not pass the check in time, and waits until it
        answers."""
        answer = asyncio.ensure_future(self._check(replica))
        await asyncio.wait([answer], timeout=wait_seconds)
        if not answer.done() or answer.cancelled() or answer.exception():
            self.silent.add(replica)
            for call in self._calls[replica]:
                if not call.expired():
                    call.reschedule(asyncio.get_running_loop().time())
            await asyncio.wait([answer])
            answer.cancelled() or answer.exception()  # a failure is an answer, too
            self.silent.discard(replica)
