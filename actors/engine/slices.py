"""Chunked encoding: launches a replay in slices, so that the steps of a language model on the same
device do not wait for a whole image. Knows no CUDA.

A forward pass is cut at some of its break points (kernels/break_points.py).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from math import inf
from statistics import median_low
from typing import NamedTuple

POLL_SECONDS = 0.001  # how often the engine's thread checks whether the device is idle

STRETCH, STRETCH_BEHIND = 1.2, 1.4
"""A step in which a request decodes takes, with its slices, at most this many times as long as a
full one without slices. The second counts while the encoder is behind, with at least BEHIND items
waiting (BENCHMARKS "How long a step may take")."""
BEHIND = 3
SLICES = 12
"""A step waits for the time of this many slices at most, where full steps are long."""
LAST_SLICES = 3
"""If at most the time of this many slices is left of a replay, and a full step has room for it, it
is launched before a step is scheduled, so that this step can use its rows."""
PASSES = 7
"""At most so many steps in a row wait for no slice."""
TOKENS_APART, CONTEXT_APART = 64, 512
"""Steps are timed in classes of so many tokens and so much context. A class of tokens ends at a
multiple of TOKENS_APART (321 to 384), where a CUDA graph usually ends, too."""
LONG_CONTEXT = 2 * CONTEXT_APART
"""From here on, it is measured by how much a context makes a step longer."""
RECENT = 31
"""So many measurements of such steps, and of each slice, are kept. Their median counts, because a
GPU slows down under load."""


class Slice:
    """A part of a replay."""

    def __init__(self, launch: Callable[[], object], seconds: float) -> None:
        """`seconds`: on the device, until it has been measured beside steps."""
        self.launch = launch
        self.seconds = seconds
        self._taken = deque([seconds], maxlen=RECENT)

    def took(self, seconds: float) -> None:
        self._taken.append(seconds)
        self.seconds = median_low(self._taken)


def took_together(slices: Sequence[Slice], seconds: float) -> None:
    """Divides what slices took together among them, in proportion to what was expected of each."""
    expected = [each.seconds or 1e-6 for each in slices]  # 0 would stay 0
    total = sum(expected)
    for each, share in zip(slices, expected, strict=True):
        each.took(seconds * share / total)


class Step(NamedTuple):
    """A step of the language model."""

    tokens: int
    context: int
    """Tokens of earlier steps that each of them attends to, on average."""


class StepTimes:
    """How long steps have recently taken without their slices."""

    def __init__(self, full_tokens: float = inf, graph_tokens: Collection[int] = ()) -> None:
        """`full_tokens`: the most tokens of a step in which a request decodes. `graph_tokens`:
        sizes of CUDA graphs; a step takes as long as one with as many tokens as its graph."""
        self.full_tokens = full_tokens
        self.graph_tokens = graph_tokens
        self._seconds: dict[Step, deque[float]] = {}
        self._full: Step | None = None
        self._growth = deque[float](maxlen=RECENT)
        """Of the time of a full step for each token of its context, as a share."""

    def add(self, step: Step, seconds: float) -> None:
        kind = self._kind(step)
        self._seconds.setdefault(kind, deque(maxlen=RECENT)).append(seconds)
        if step.tokens > self.full_tokens:
            return
        self._full = max(self._full or kind, kind, key=lambda each: (each.tokens, -each.context))
        if step.context >= LONG_CONTEXT and kind.tokens == self._full.tokens:
            times = seconds / median_low(self._seconds[self._full])
            self._growth.append((times - 1) / step.context)

    def room(self, step: Step, stretch: float) -> tuple[float, bool]:
        """Seconds for slices before `step`, 0 until a step has been measured. And whether the step
        takes longer than a full one, because it reads the end of a long prompt, or because it has
        more tokens, as no request decodes in it. A full step has the most tokens up to
        `full_tokens`, and of such steps the least context."""
        if self._full is None:
            return 0.0, False
        full, kind = median_low(self._seconds[self._full]), self._kind(step)
        seconds = median_low(self._seconds[kind]) if kind in self._seconds else full
        return stretch * full - seconds, seconds > full and 2 * kind.tokens > self._full.tokens

    def room_of_any(self, stretch: float) -> float:
        """Seconds for slices before a step of which nothing is known yet: those of a full one."""
        return (stretch - 1) * median_low(self._seconds[self._full]) if self._full else 0.0

    def tokens_beside(self, context: int, stretch: float) -> float:
        """The most tokens of a step beside so much context with which it takes at most `stretch`
        times as long as a full one."""
        growth = max(0.0, median_low(self._growth)) if self._growth else 0.0
        share = stretch / (1 + growth * context)
        if share >= 1:
            return self.full_tokens
        tokens = self.full_tokens * share
        if tokens > max(self.graph_tokens, default=0):  # such a step has no graph
            return tokens
        return max((each for each in self.graph_tokens if each <= tokens), default=tokens)

    def _kind(self, step: Step) -> Step:
        return Step((step.tokens - 1) // TOKENS_APART, step.context // CONTEXT_APART)


class Pace:
    """Launches slices before the steps of the language model, and two at a time while no step is
    running.

    The engine's thread calls `launch`. The thread that schedules and launches steps calls `finish`
    while it schedules one, and `step` before it launches it. They launch slices themselves, so that
    they do not wait until another thread gets the GIL.
    """

    def __init__(self, slice_seconds: float) -> None:
        self.slice_seconds = slice_seconds
        self.times = StepTimes()
        self.waiting = 0  # items that nobody has begun to encode
        self._changed = threading.Condition()
        self._slices = deque[Slice]()  # of a replay, not launched yet
        self._finished_seconds = 0.0  # of slices launched since the last step
        self._passed = 0  # steps since one waited for a slice
        self._failure: Exception | None = None

    @property
    def stretch(self) -> float:
        return STRETCH_BEHIND if self.waiting >= BEHIND else STRETCH

    def launch(self, slices: Iterable[Slice]) -> None:
        """Returns when all slices are launched. Raises what one of them raised."""
        with self._changed:
            self._slices.extend(slices)
            while self._slices:
                if self.idle():
                    self._launch_first()
                else:
                    self._changed.wait(POLL_SECONDS)
            failure, self._failure = self._failure, None
        if failure:
            raise failure

    def finish(self) -> bool:
        """Launches the rest of a replay if it is short. Returns whether it did."""
        with self._changed:
            seconds = self._finished_seconds + sum(each.seconds for each in self._slices)
            most = min(LAST_SLICES * self.slice_seconds, self.times.room_of_any(self.stretch))
            if not self._slices or seconds > most:
                return False
            self._finished_seconds += self._launch_within(inf)
            self._passed = 0
            self._changed.notify()
            return self._failure is None

    def step(self, step: Step) -> None:
        """Launches as many slices as there is room for (`StepTimes`), but at least one, so that
        every item makes progress. Steps that are longer than a full one may wait for none, but not
        more than PASSES in a row. Called before each step of the language model."""
        with self._changed:
            finished, self._finished_seconds = self._finished_seconds, 0.0
            if self._slices:
                room, long = self.times.room(step, self.stretch)
                left = min(room, SLICES * self.slice_seconds) - finished
                if not finished and (not long or self._passed == PASSES):
                    left = max(left, self._slices[0].seconds)
                self._passed += 1
                if self._slices[0].seconds <= left:
                    self._passed = 0
                    self._launch_within(left)
                if not self._slices:
                    self._changed.notify()
        self.before_step(step)

    def _launch_within(self, left: float) -> float:
        """Launches slices that take at most so many seconds in all. Returns how many they take."""
        launched: list[Slice] = []
        self.after_steps()
        while self._slices and self._slices[0].seconds <= left:
            launched.append(self._launch_first())
            left -= launched[-1].seconds
        if not self._failure:
            self.slices_launched(launched)
        return sum(each.seconds for each in launched)

    def _launch_first(self) -> Slice:
        first = self._slices.popleft()
        try:
            first.launch()
        except Exception as error:  # fails the item, not the step
            self._slices.clear()
            self._failure = error
        return first

    # Overridden for a device that runs asynchronously: see engine/cuda.py

    def idle(self) -> bool:
        """Whether no step is running, and at most one slice that was launched."""
        return True

    def after_steps(self) -> None:
        """Makes slices launched from now on wait for the steps launched before."""

    def slices_launched(self, slices: Sequence[Slice]) -> None:
        """Called after `after_steps` and these slices."""

    def before_step(self, step: Step) -> None:
        """Makes the next step wait for the slices launched before."""

    def step_launched(self) -> None:
        """Called when the whole of a step has been launched, and nothing of the next one."""
