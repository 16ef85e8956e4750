"""Waits until something holds, and fails if it does not in time.

Imports only the standard library, because tests/engines run in environments of other engines.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, sleep


def until(true: Callable[[], object], seconds: float = 30) -> None:
    """For conditions that cost next to nothing: checks every 2 ms."""
    end = monotonic() + seconds
    while not true():
        assert monotonic() < end, "not in time"
        sleep(0.002)


def within(seconds: float, true: Callable[[], object]) -> None:
    """For conditions that other processes are asked about. Asks less often the longer it waits,
    because asking takes CPU time from what it waits for."""
    started = monotonic()
    while not true():
        waited = monotonic() - started
        assert waited < seconds, "not in time"
        sleep(min(0.05 + waited / 10, 0.5))
