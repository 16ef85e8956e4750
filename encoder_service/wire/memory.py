"""How glibc treats memory that is freed, for processes that send or receive rows."""

from __future__ import annotations

import ctypes
from contextlib import suppress

KEPT_BYTES = 2**28
LARGEST_BLOCK_BYTES = 2**25
"""The largest that glibc accepts. It always returns larger blocks to the system."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h


def keep_freed_memory() -> None:
    """Makes glibc keep up to KEPT_BYTES of freed memory in an arena for the next rows.

    By default it returns large blocks to the system at once, and faulting them in again takes
    longer than receiving or sending the rows in them. Other C libraries stay as they are.
    """
    with suppress(AttributeError, TypeError):  # no `mallopt`; no CDLL(None), as on Windows
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, LARGEST_BLOCK_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
