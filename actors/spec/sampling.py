"""Which frames of a video are encoded: each family's own rule, on indices alone. Pure.

Each equals the `sample_frames` of the family's video processor in transformers, file by file, but
that of Kimi-K2.5 the code that it is published with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class Sampling(Protocol):
    """One rule."""

    @property
    def most(self) -> int:
        """The most frames that it takes, whatever the video."""

    @property
    def fps(self) -> float:
        """Frames a second that it aims at; what a list of frames has unless it says otherwise."""

    def indices(self, frames: int, fps: float) -> list[int]:
        """The frames to take of so many, which are shown at `fps` a second. Ascending."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Evenly from the first frame to the last (transformers: Qwen3VLVideoProcessor)."""

    fps: float
    least: int
    most: int

    def indices(self, frames: int, fps: float) -> list[int]:
        """See Sampling."""
        count = min(max(int(frames / fps * self.fps), self.least), self.most, frames)
        return rounded(np.linspace(0, frames - 1, count).round())


@dataclass(frozen=True, slots=True)
class Strided:
    """In equal steps from the first frame on, whole groups (Qwen2VLVideoProcessor)."""

    fps: float
    least: int
    most: int
    group: int

    def indices(self, frames: int, fps: float) -> list[int]:
        """See Sampling. None of fewer frames than a group."""
        most = min(self.most, frames) // self.group * self.group
        count = min(max(frames / fps * self.fps, self.least), most, frames)
        count = math.floor(count / self.group) * self.group
        if not count:
            return []
        # As torch.arange has them: steps in float64, values in float32, then cut off. Beyond some
        # 10,000 frames its vectors may round to a neighbour, by the width the machine has them in.
        return rounded((np.arange(count) * (frames / count)).astype(np.float32))


@dataclass(frozen=True, slots=True)
class Timed:
    """At equal times, up to a duration (Glm4vVideoProcessor)."""

    fps: float
    most_seconds: float

    @property
    def most(self) -> int:
        """See Sampling."""
        return even(int(self.most_seconds * self.fps))

    def indices(self, frames: int, fps: float) -> list[int]:
        """See Sampling. An even number: the last one perhaps twice."""
        last, seconds = frames - 1, frames / fps
        if seconds <= self.most_seconds:
            count = max(int(seconds * self.fps), 1)
            found = [min(last, math.ceil(i * fps / self.fps)) for i in range(count)]
        elif (count := int(self.most_seconds * self.fps)) >= frames:
            found = list(range(frames))
        else:
            times = np.linspace(0, seconds, count)
            found = [min(last, math.ceil(time * fps)) for time in times]
        return paired(found)


@dataclass(frozen=True, slots=True)
class Thinning:
    """Fewer a second the longer the video (Glm46VVideoProcessor, whose numbers are fixed)."""

    group: int
    most: int = 640

    @property
    def fps(self) -> float:
        """See Sampling. Of a video of half a minute."""
        return 3.0 * self.group

    def indices(self, frames: int, fps: float) -> list[int]:
        """See Sampling. An even number: the last one perhaps twice."""
        seconds = frames / fps
        rate = (3 if seconds <= 30 else 1 if seconds <= 300 else 0.5) * self.group
        count = min(int(min(seconds, 2400) * rate), self.most)
        if frames < count:
            found = rounded(np.linspace(0, frames - 1, count))
        else:
            found = thinned(frames, fps, rate)
        if len(found) < count:
            found = rounded(np.linspace(found[0], found[-1], count))
        elif len(found) > count:
            found = rounded(np.linspace(0, frames - 1, count))
        return paired(found)


@dataclass(frozen=True, slots=True)
class Paced:
    """Evenly from the first frame to the last, not more often than they are shown (Kimi-K2.5)."""

    fps: float
    most: int

    def indices(self, frames: int, fps: float) -> list[int]:
        """See Sampling."""
        count = min(max(round(frames * min(self.fps, fps) / fps), 1), self.most)
        return rounded(np.linspace(0, frames - 1, count).round())


@dataclass(frozen=True, slots=True)
class Evenly:
    """So many, in equal steps from the first frame on (transformers: default_sample_indices_fn)."""

    most: int
    fps: float = 1.0

    def indices(self, frames: int, fps: float) -> list[int]:
        """See Sampling. `fps` does not matter."""
        count = min(self.most, frames)
        return [index * frames // count for index in range(count)]


@dataclass(frozen=True, slots=True)
class Middles:
    """The middle frame of each of so many equal parts (InternVLVideoProcessor)."""

    most: int
    fps: float = 2.0

    def indices(self, frames: int, fps: float) -> list[int]:
        """See Sampling. `fps` does not matter."""
        count = min(self.most, frames)
        step = frames / count
        return rounded((step / 2 + np.arange(count) * step).astype(np.float32))


def thinned(frames: int, fps: float, rate: float) -> list[int]:
    """The first frame at or after each 1 / rate of a second, until the last whole second."""
    found, due = [], 0.0
    for index in range(frames):
        if index * (1 / fps) >= due:
            due += 1 / rate
            found.append(index)
            if due >= int(frames / fps):
                break
    return found


def paired(found: list[int]) -> list[int]:
    """Without repeats, then an even number of them: the last one perhaps twice."""
    once = list(dict.fromkeys(found))
    return once + once[-1:] if len(once) % 2 else once


def rounded(values: np.ndarray[tuple[int], np.dtype[np.floating]]) -> list[int]:
    """Cut off to integers."""
    indices: list[int] = values.astype(int).tolist()
    return indices


def even(count: int) -> int:
    """The next even number."""
    return count + count % 2
