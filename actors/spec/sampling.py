"""Which frames of a video are encoded: one rule per family, on indices alone. Pure: no torch.

Each rule equals `sample_frames` of the family's video processor in transformers; that of Kimi-K2.5
equals the code published with the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

import numpy as np

from actors.spec.sizing import Defaults, Largest
from actors.types import ProcessorKwargs

MOST_FPS = 240.0
MOST_SAMPLED = 8192
"""The most frames of a video whose rule has no limit of its own. A limit on tokens is reached
first."""


class Sampling(Protocol):
    @property
    def most(self) -> int:
        """The most frames of any video."""

    @property
    def fps(self) -> float:
        """Target frames per second; also the rate assumed for a list of frames."""

    def indices(self, frames: int, fps: float) -> list[int]:
        """Which of `frames` frames, shown at `fps` per second, to take. Ascending."""

    def defaults(self) -> Defaults:
        """The options that a request may set, and their defaults. None: the other option holds."""

    def largest(self) -> Largest:
        """The largest values of these options."""

    def asked(self, kwargs: ProcessorKwargs) -> Self:
        """The rule for a video with a request's options."""


@dataclass(frozen=True, slots=True)
class ByFps:
    """Frames per second, which a request may change."""

    fps: float

    def defaults(self) -> Defaults:
        return {"fps": self.fps}

    def largest(self) -> Largest:
        return {"fps": MOST_FPS}

    def asked(self, kwargs: ProcessorKwargs) -> Self:
        return replace(self, fps=kwargs.fps or self.fps)


@dataclass(frozen=True, slots=True)
class ByFpsOrFrames:
    """Frames per second or in all: a request may change either."""

    fps: float
    least: int
    most: int
    num_frames: int = field(default=0, kw_only=True)  # 0: by `fps`

    def defaults(self) -> Defaults:
        return {"fps": self.fps, "num_frames": self.num_frames or None}

    def largest(self) -> Largest:
        return {"fps": MOST_FPS, "num_frames": self.most}

    def asked(self, kwargs: ProcessorKwargs) -> Self:
        return replace(self, **fps_or_frames(kwargs, num_frames=0))


@dataclass(frozen=True, slots=True)
class Spread(ByFpsOrFrames):
    """Evenly from the first frame to the last (transformers: Qwen3VLVideoProcessor)."""

    def indices(self, frames: int, fps: float) -> list[int]:
        count = max(int(frames / fps * self.fps), self.least)
        count = min(self.num_frames or count, self.most, frames)
        return rounded(np.linspace(0, frames - 1, count).round())


@dataclass(frozen=True, slots=True)
class Strided(ByFpsOrFrames):
    """In equal steps from the first frame on, whole groups (Qwen2VLVideoProcessor)."""

    group: int

    def indices(self, frames: int, fps: float) -> list[int]:
        """Empty for fewer frames than a group."""
        most = min(self.most, frames) // self.group * self.group
        count = max(frames / fps * self.fps, self.least)
        if self.num_frames:
            count = max(1, round(self.num_frames / self.group)) * self.group
        count = math.floor(min(count, most) / self.group) * self.group
        if not count:
            return []
        # As torch.arange: steps in float64, values in float32, then truncated. Beyond about 10,000
        # frames torch may round to a neighbour, depending on the machine's vector width.
        return rounded((np.arange(count) * (frames / count)).astype(np.float32))


@dataclass(frozen=True, slots=True)
class Timed(ByFps):
    """At equal times, up to a duration (Glm4vVideoProcessor). If `fps` is too low for a frame in
    that duration, transformers takes no frame of a longer video; this takes one."""

    most_seconds: float

    @property
    def most(self) -> int:
        count = max(1, int(self.most_seconds * self.fps))
        return count + count % 2

    def indices(self, frames: int, fps: float) -> list[int]:
        """An even number of frames; the last may be repeated."""
        last, seconds = frames - 1, frames / fps
        if seconds <= self.most_seconds and self.fps > fps:
            found = list(range(frames))
        elif seconds <= self.most_seconds:
            count = max(int(seconds * self.fps), 1)
            found = [min(last, math.ceil(i * fps / self.fps)) for i in range(count)]
        elif (count := max(int(self.most_seconds * self.fps), 1)) >= frames:
            found = list(range(frames))
        else:
            times = np.linspace(0, seconds, count)
            found = [min(last, math.ceil(time * fps)) for time in times]
        return paired(found)


@dataclass(frozen=True, slots=True)
class Thinning:
    """Fewer per second for longer videos (Glm46VVideoProcessor, whose numbers are fixed)."""

    group: int
    most: int = 640

    @property
    def fps(self) -> float:
        """The rate for a video of up to half a minute."""
        return 3.0 * self.group

    def indices(self, frames: int, fps: float) -> list[int]:
        """An even number of frames; the last may be repeated."""
        seconds = frames / fps
        rate = (3 if seconds <= 30 else 1 if seconds <= 300 else 0.5) * self.group
        return thinned(frames, fps, rate, min(int(min(seconds, 2400) * rate), self.most))

    def defaults(self) -> Defaults:
        return {}

    def largest(self) -> Largest:
        return {}

    def asked(self, kwargs: ProcessorKwargs) -> Self:
        return self


@dataclass(frozen=True, slots=True)
class Thinned(ByFps):
    """Like Thinning, at one rate (Glm5NextVideoProcessor)."""

    most: int

    def indices(self, frames: int, fps: float) -> list[int]:
        """An even number of frames; the last may be repeated. Empty if the video is too short for
        one."""
        return thinned(frames, fps, self.fps, min(int(frames / fps * self.fps), self.most))


@dataclass(frozen=True, slots=True)
class Paced(ByFps):
    """Evenly from the first frame to the last, at most at the video's own rate (Kimi-K2.5)."""

    most: int

    def indices(self, frames: int, fps: float) -> list[int]:
        count = min(max(round(frames * min(self.fps, fps) / fps), 1), self.most)
        return rounded(np.linspace(0, frames - 1, count).round())


@dataclass(frozen=True, slots=True)
class Counted:
    """A fixed number of frames, or so many per second."""

    most: int
    fps: float = 1.0
    by_fps: bool = False

    def count(self, frames: int, fps: float) -> int:
        wanted = max(1, int(frames / fps * self.fps)) if self.by_fps else self.most
        return min(wanted, self.most, frames)

    def defaults(self) -> Defaults:
        by_fps = {"fps": self.fps, "num_frames": None}
        return by_fps if self.by_fps else {"fps": None, "num_frames": self.most}

    def largest(self) -> Largest:
        return {"fps": MOST_FPS, "num_frames": MOST_SAMPLED}

    def asked(self, kwargs: ProcessorKwargs) -> Self:
        chosen = fps_or_frames(kwargs, most=MOST_SAMPLED)
        return replace(self, **chosen, by_fps="fps" in chosen or (self.by_fps and not chosen))


@dataclass(frozen=True, slots=True)
class Evenly(Counted):
    """In equal steps from the first frame on (default_sample_indices_fn)."""

    def indices(self, frames: int, fps: float) -> list[int]:
        count = self.count(frames, fps)
        return [index * frames // count for index in range(count)]


@dataclass(frozen=True, slots=True)
class Middles(Counted):
    """The middle frame of each of equal parts (InternVLVideoProcessor)."""

    fps: float = 2.0

    def indices(self, frames: int, fps: float) -> list[int]:
        count = self.count(frames, fps)
        step = frames / count
        return rounded((step / 2 + np.arange(count) * step).astype(np.float32))


@dataclass(frozen=True, slots=True)
class UpToFps(Counted):
    """A number of frames in equal steps from the first frame on, but at most `max_fps` per second
    (Molmo2VideoProcessor)."""

    max_fps: float = field(default=2.0, kw_only=True)

    def count(self, frames: int, fps: float) -> int:
        if self.by_fps:
            wanted = int(frames / fps * self.fps)
        elif fps > self.max_fps:
            wanted = min(self.most, int(frames / fps * self.max_fps))
        else:
            wanted = self.most
        return max(1, min(wanted, self.most, frames))

    def indices(self, frames: int, fps: float) -> list[int]:
        count = self.count(frames, fps)
        # As torch.arange: see Strided.
        return rounded((np.arange(count) * (frames / count)).astype(np.float32))


def fps_or_frames(kwargs: ProcessorKwargs, **by_fps: int) -> dict[str, Any]:
    """The fields of a rule with both options that a request changes. `by_fps`: the field of the
    number of frames, and its value if the request sets `fps`."""
    (name,) = by_fps
    if kwargs.num_frames:
        return {name: kwargs.num_frames}
    return {"fps": kwargs.fps, **by_fps} if kwargs.fps else {}


def thinned(frames: int, fps: float, rate: float, count: int) -> list[int]:
    """About `count` frames: those of each 1 / rate of a second, or evenly spread; paired."""
    found = by_rate(frames, fps, rate) if count <= frames else []
    if len(found) < count:
        first, last = (found[0], found[-1]) if found else (0, frames - 1)
        found = rounded(np.linspace(first, last, count))
    elif len(found) > count:
        found = rounded(np.linspace(0, frames - 1, count))
    return paired(found)


def by_rate(frames: int, fps: float, rate: float) -> list[int]:
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
    """Removes repeated frames, then repeats the last one if their number is odd."""
    once = list(dict.fromkeys(found))
    return once + once[-1:] if len(once) % 2 else once


def rounded(values: np.ndarray[tuple[int], np.dtype[np.floating]]) -> list[int]:
    """Truncated to integers."""
    indices: list[int] = values.astype(int).tolist()
    return indices
