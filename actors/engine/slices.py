"""Chunked encoding: launches a replay in slices, so that the steps of a language model on the same
device do not wait for a whole image. Knows no CUDA.

A forward pass is cut at some of its break points (kernels/break_points.py).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from time import sleep

POLL_SECONDS = 0.001  # how often the engine's thread checks whether the steps have ended

SHORT_STEP_TOKENS, SHORT_STEP_SHARE = 256, 3
TOKENS_PER_SHARE = 2048
"""How many slices a step waits for. A step that only decodes is short, so it can wait for several
and still be shorter than a prefill. Longer steps wait in proportion to their length."""
ITEMS_PER_SHARE, MOST_SHARES = 2, 4
"""Steps wait up to MOST_SHARES times as long while many items do. The items' requests then decode
together, in fewer steps, so that more requests per second are answered (BENCHMARKS.md, Answers)."""
STEADY_TOKENS, STEADY_SHORT_SHARE = 512, 5
"""A server that limits steps to few tokens is meant to have short gaps between tokens. So a step
waits for at most one slice per STEADY_TOKENS of the largest possible step. This limit is never less
than one slice, or STEADY_SHORT_SHARE slices for a step that only decodes."""

Slice = tuple[float, Callable[[], object]]
"""Its seconds on the device, and the function that launches it."""


class Pace:
    """Launches slices: about `slice_seconds` of them before each step of the language model, and
    one at a time while no step is running.

    The engine's thread calls `launch`. The thread that launches steps calls `step` before each one.
    `step` launches slices itself, so that it does not wait until another thread gets the GIL.
    """

    def __init__(self, slice_seconds: float) -> None:
        self.slice_seconds = slice_seconds
        self._lock = threading.Lock()
        self._slices = deque[Slice]()  # of a replay, not launched yet
        self._failure: Exception | None = None

    def launch(self, slices: Iterable[Slice]) -> None:
        """Returns when all slices are launched. Raises what one of them raised."""
        self._slices.extend(slices)
        while self._slices:
            with self._lock:
                if self._slices and self.idle():
                    self._launch_first()
            self.rest()
        with self._lock:  # a step may still be launching the last one
            failure, self._failure = self._failure, None
        if failure:
            raise failure

    def step(self, share: int = 1) -> None:
        """Launches slices that take at most `share` times `slice_seconds` in total, but at least
        one, so that every item makes progress. Called before each step of the language model."""
        with self._lock:
            if self._slices:
                self.after_steps()
                left = self.slice_seconds * share - self._launch_first()
                while self._slices and self._slices[0][0] <= left:
                    left -= self._launch_first()
        self.before_step()

    def _launch_first(self) -> float:
        """Returns its seconds."""
        seconds, launch = self._slices.popleft()
        try:
            launch()
        except Exception as error:  # fails the item, not the step
            self._slices.clear()
            self._failure = error
        return seconds

    # Overridden for a device that runs asynchronously: see engine/cuda.py

    def idle(self) -> bool:
        """Whether neither a step nor a slice is running."""
        return True

    def rest(self) -> None:
        """Waits between two checks whether the device is idle."""
        if self._slices:
            sleep(POLL_SECONDS)

    def after_steps(self) -> None:
        """Makes slices launched from now on wait for the steps launched before."""

    def before_step(self) -> None:
        """Makes the next step wait for the slices launched before."""


def share_of(tokens: int, waiting: int, most_tokens: int) -> int:
    """Slices that a step of the language model waits for, at least one.

    `tokens`: in the step. `waiting`: items to be encoded. `most_tokens`: of the largest step.
    """
    share, least = max(1, tokens // TOKENS_PER_SHARE), 1
    if tokens < SHORT_STEP_TOKENS:
        share, least = SHORT_STEP_SHARE, STEADY_SHORT_SHARE
    more = share * min(MOST_SHARES, 1 + waiting // ITEMS_PER_SHARE)
    return min(more, max(least, most_tokens // STEADY_TOKENS))
