"""How fast work is done, measured while there is some. Pure: time is an argument, in seconds."""

from __future__ import annotations

import math

LOOK_BACK_SECONDS = 5.0
"""Of busy time: what is older hardly counts."""
LEAST_SECONDS = 1.0
"""Of busy time, before a rate is believed."""


class Drain:
    """Patches a second of busy time, recent ones weighing more.

    Time without work tells nothing of how fast the fleet is, and is left out. With little to do the
    rate is lower than the fleet's best; it rises within seconds as more is waiting.
    """

    def __init__(self) -> None:
        self._patches = 0.0
        self._seconds = 0.0
        self._seen = 0.0

    def resume(self, now: float) -> None:
        """There is work again."""
        self._seen = now

    def did(self, patches: int, now: float) -> None:
        """So many were done; since `resume` there was always work."""
        passed = (now - self._seen) / LOOK_BACK_SECONDS
        kept = math.exp(-passed)
        # As if done evenly over the time that passed: a lump at its end would weigh too much.
        self._patches = self._patches * kept + patches * ((1 - kept) / passed if passed else 1)
        self._seconds = self._seconds * kept + LOOK_BACK_SECONDS * (1 - kept)
        self._seen = now

    def seconds(self, patches: float) -> float | None:
        """How long so many take. None: not measured yet."""
        if self._seconds < LEAST_SECONDS or not self._patches:
            return None
        return patches * self._seconds / self._patches
