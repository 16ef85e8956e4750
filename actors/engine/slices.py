"""Chunked encoding: a replay is launched in slices, each a few layers of the tower. So the steps of
a language model on the same device need not wait for a whole image. Knows no CUDA.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter

from actors.models.layers.block import between_layers

POLL_SECONDS = 0.001  # how often the engine's thread looks whether the steps have ended
MOST_LAUNCH_SECONDS = 1.0  # how long a step waits for slices to be launched


class Pace:
    """Says when a slice may be launched: before each step of the language model for as long as
    `slice_seconds`, and whenever no step is running, one at a time.

    The engine's thread calls `begin` before each slice, and `end` when no pack is left to launch.
    The thread that launches the steps calls `step` before each.
    """

    def __init__(self, slice_seconds: float) -> None:
        self.slice_seconds = slice_seconds
        self._changed = threading.Condition()
        self._asking = False  # the engine's thread is waiting in `begin`
        self._left: float | None = None  # of the time before a step; None: no step is waiting
        self._first = False  # nothing has been launched before this step

    def begin(self, seconds: float) -> None:
        """Waits until a slice that takes this long may be launched."""
        with self._changed:
            self._asking = True
            try:
                while not self._allowed(seconds):
                    self._changed.wait(POLL_SECONDS)
            finally:  # a device error must not hold up later steps
                self._asking = False

    def end(self) -> None:
        with self._changed:
            self._launched()

    def step(self, share: int = 1) -> None:
        """Lets slices be launched that take at most `share` times `slice_seconds` together, but at
        least one, so that every item makes progress. Returns when they are launched."""
        with self._changed:
            if self._asking:
                self.after_steps()
                self._left, self._first = self.slice_seconds * share, True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._left is None, MOST_LAUNCH_SECONDS)
                self._left = None
        self.before_step()

    def _allowed(self, seconds: float) -> bool:
        if self._left is None:
            return self.idle()
        if self._first or seconds <= self._left:
            self._left, self._first = self._left - seconds, False
            return True
        self._launched()
        return False

    def _launched(self) -> None:
        self._left = None
        self._changed.notify_all()

    # Of a device that runs behind its threads: see engine/cuda.py

    def idle(self) -> bool:
        """Whether neither a step nor a slice is running."""
        return True

    def after_steps(self) -> None:
        """Slices that are launched from now on wait for the steps launched before."""

    def before_step(self) -> None:
        """The step that is launched next waits for the slices launched before."""


class EveryNth:
    """Calls `call` at every nth of its own calls."""

    def __init__(self, n: int, call: Callable[[], object]) -> None:
        self.n = n
        self.call = call
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls % self.n == 0:
            self.call()


def layers_of(run: Callable[[], object]) -> int:
    """How many layers a forward pass has, by running it."""
    boundaries = EveryNth(1, int)
    with between_layers(boundaries):
        run()
    return boundaries.calls + 1


def layers_per_slice(run: Callable[[], object], slice_seconds: float) -> tuple[int, float]:
    """How many layers of this forward pass take about as long as a slice should, at least one; and
    the seconds that they take. `run` returns when the pass has ended."""
    layers = layers_of(run)
    started = perf_counter()
    run()
    seconds = (perf_counter() - started) / layers  # of a layer
    chosen = max(1, min(layers, round(slice_seconds / max(seconds, 1e-9))))
    return chosen, chosen * seconds
