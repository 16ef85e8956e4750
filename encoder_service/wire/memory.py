"""How glibc treats memory that is freed, for processes that send or receive rows."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

KEPT_BYTES = 2**28
LARGEST_BLOCK_BYTES = 2**25
"""The largest that every glibc accepts. Larger blocks are always returned to the system."""

SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
"""Environment variables with which an operator decides this instead."""


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory of this process for the next rows: up to KEPT_BYTES that the
    main thread allocated, and up to 64 MiB of each other arena.

    By default it returns large blocks to the system at once, and faulting them in again takes
    longer than receiving or sending the rows in them. Does nothing with another C library, or if
    the environment has one of SETTINGS.
    """
    if any(name in os.environ for name in SETTINGS):
        return
    with suppress(AttributeError, OSError, TypeError):  # no mallopt, or no CDLL(None)
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, LARGEST_BLOCK_BYTES)  # M_MMAP_THRESHOLD
        mallopt(-1, KEPT_BYTES)  # M_TRIM_THRESHOLD
