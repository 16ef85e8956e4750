"""The end of a request's time, put around each wait. Knows nothing of what is waited for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import TypeVar

from actors.errors import DeadlineExceeded

GRACE_SECONDS = 1.0
"""The router keeps the deadline item by item; this much later the whole request is given up."""

Result = TypeVar("Result")


class Deadline:
    """`seconds` from now. `advice` is for whoever misses it."""

    def __init__(
        self, seconds: float, advice: str = "send less, or give options.timeout_s"
    ) -> None:
        self.seconds = seconds
        self.advice = advice
        self.end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds until then. Raises DeadlineExceeded."""
        seconds = self.end - time.monotonic()
        if seconds <= 0:
            raise DeadlineExceeded(f"the time was over before encoding began: {self.advice}")
        return seconds

    async def keep(self, work: Awaitable[Result]) -> Result:
        """What the work gives, if it gives it in time. Raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(self.end + GRACE_SECONDS - time.monotonic()):
                return await work
        except TimeoutError:
            raise DeadlineExceeded(
                f"not answered within {self.seconds:g} s: {self.advice}"
            ) from None
