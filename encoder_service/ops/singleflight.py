"""Work that many ask for at about the same time, done once for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


class Fresh(Generic[Result]):
    """The result of `work`, at most about `seconds` old."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, Result]], seconds: float) -> None:
        self._work = work
        self._seconds = seconds
        self._task: asyncio.Task[Result] | None = None
        self._until = 0.0

    async def get(self) -> Result:
        """Begun by the first who asks, finished whoever goes away. Raises what the work raises."""
        loop = asyncio.get_running_loop()
        if self._task is None or (self._task.done() and loop.time() >= self._until):
            # An empty context: in a request's own, Serve would cancel its calls with the request.
            self._task = loop.create_task(self._timed(), context=Context())
        return await asyncio.shield(self._task)

    async def _timed(self) -> Result:
        try:
            return await self._work()
        finally:
            self._until = asyncio.get_running_loop().time() + self._seconds
