"""Limits on what one request may use of this process: memory, time and the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from actors.errors import DeadlineExceeded, Overloaded, TooLarge
from encoder_service.config import LimitOptions

GRACE_SECONDS = 1.0
"""The router enforces the deadline per item; the whole request is ended this much later."""

INLINE_BYTES = 256 * 1024
"""Hashing, parsing or copying this much takes less time than a round trip to a thread."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

Take = Callable[[int], None]
"""Counts bytes of a request. Raises Overloaded if the process would hold too many."""


def declared_bytes(length: str) -> int:
    """Of a content-length header; 0 if it is missing or no number."""
    # Python refuses to convert thousands of digits; 18 are enough to exceed any limit.
    return int(length[:18]) if length.isdecimal() else 0


def check_items(items: int, limits: LimitOptions) -> None:
    if items > limits.max_items:
        raise TooLarge(
            f"{items} items in one request; limits.max_items is {limits.max_items}: "
            "send several requests"
        )


def check_body_bytes(size_bytes: int, limits: LimitOptions) -> None:
    most = limits.max_body_bytes
    if size_bytes > most:
        raise TooLarge(
            f"the body is over {most} bytes (limits.max_body_bytes): send fewer or smaller items, "
            "or raise the limit"
        )


class Buffered:
    """Limits the bytes of requests, or of answers, that are held at a time. Beyond `most_bytes`,
    429.

    `what`: what is limited, in the error message.
    """

    def __init__(self, most_bytes: int, what: str) -> None:
        self.most_bytes = most_bytes
        self.what = what
        self.held_bytes = 0

    @contextmanager
    def hold(self) -> Iterator[Held]:
        """Wraps one request or answer. Releases the bytes that it took at the end."""
        held = Held(self)
        try:
            yield held
        finally:
            self.held_bytes -= held.size_bytes

    def check_room(self, size_bytes: int) -> None:
        """Raises Overloaded if taking this many bytes would."""
        if self.held_bytes + size_bytes > self.most_bytes:
            raise Overloaded(f"{self.what} would exceed {self.most_bytes} bytes: try again later")


class Held:
    """The bytes that one request or answer has taken. Is a `Take`."""

    def __init__(self, buffered: Buffered) -> None:
        self.buffered = buffered
        self.size_bytes = 0

    def __call__(self, size_bytes: int) -> None:
        self.buffered.check_room(size_bytes)
        self.buffered.held_bytes += size_bytes
        self.size_bytes += size_bytes


class Deadline:
    """A deadline in `seconds` from now. `advice` is part of the error of a request that misses
    it."""

    def __init__(
        self, seconds: float, advice: str = "send less, or raise options.timeout_s"
    ) -> None:
        self.seconds = seconds
        self.advice = advice
        self.end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds until the deadline. Raises DeadlineExceeded if it has passed."""
        seconds = self.end - time.monotonic()
        if seconds <= 0:
            raise DeadlineExceeded(f"timed out before encoding began: {self.advice}")
        return seconds

    async def keep(self, work: Awaitable[Result]) -> Result:
        """The result of `work`, if it is ready in time. Raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(self.end + GRACE_SECONDS - time.monotonic()):
                return await work
        except TimeoutError:
            raise DeadlineExceeded(
                f"not answered within {self.seconds:g} s: {self.advice}"
            ) from None


async def offload(
    size_bytes: int,
    work: Callable[Arguments, Result],
    *args: Arguments.args,
    **kwargs: Arguments.kwargs,
) -> Result:
    """work(...), in a thread if it touches more than INLINE_BYTES.

    The event loop stays responsive only as far as the work releases the GIL. A C parser holds it
    until it returns, so wire/formats.py bounds the number of values in a body. json.loads still
    makes one string of a body, which takes a few tenths of a second for 128 MiB.
    """
    if size_bytes <= INLINE_BYTES:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)
