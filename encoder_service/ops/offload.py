"""Work on many bytes goes to a thread; on few it is done here.

A thread leaves the event loop free as far as the work lets go of the interpreter: hashing and
decompressing do, Python code does every few milliseconds, one call of a C parser does not before
its end. So what is parsed here is bounded first (bounds.py) or done in pieces (formats.py). What is
left is the one string that json.loads makes of a body: a few tenths of a second for the 128 MiB
that limits.max_body_bytes lets in by default.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

INLINE_BYTES = 256 * 1024
"""Hashing, parsing or copying so much takes less than the way to a thread and back."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


async def offload(
    size_bytes: int,
    work: Callable[Arguments, Result],
    *args: Arguments.args,
    **kwargs: Arguments.kwargs,
) -> Result:
    """work(...), in a thread if it touches more than INLINE_BYTES."""
    if size_bytes <= INLINE_BYTES:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)
