"""Reads animated GIF and WebP files as videos, from their block headers. Decodes no pixels.

Each frame of such a file has its own duration. The file is treated as a video of constant rate that
shows the same, so that its frames are sampled in time like those of any video.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

from actors.errors import InvalidMedia, UnsupportedMedia
from actors.types import Clip, Size

LEAST_STEP_MS = 10
"""Minimum step of the constant rate, and the unit of time in a GIF."""
UNSAID_MS = 100  # duration of frames that declare 10 ms or less, as in browsers
MOST_BLOCKS = 2**20  # per file, sub-blocks included, to bound the time of reading them

EXTENSION, IMAGE, TRAILER, CONTROL = b"!,;\xf9"  # of a GIF
TO_BACKGROUND = 2  # a frame's disposal: what it covered is cleared


@dataclass(frozen=True, slots=True)
class Animation:
    """The timing of an animation's frames."""

    durations_ms: tuple[int, ...]
    transparent: bool  # whether some pixels may be transparent

    @property
    def step_ms(self) -> int:
        """The time between two frames of the constant rate."""
        step = math.gcd(*self.durations_ms)
        return step if step >= LEAST_STEP_MS else LEAST_STEP_MS

    def clip(self, size: Size) -> Clip:
        """The video of constant rate, with frames of this size."""
        return Clip(size, sum(self.durations_ms) // self.step_ms, 1000 / self.step_ms)

    def places(self, wanted: list[int]) -> list[int]:
        """The index in the file of each of these frames of the constant rate."""
        ends = list(accumulate(self.durations_ms))
        return [bisect_right(ends, index * self.step_ms) for index in wanted]


def is_animation(data: bytes) -> bool:
    """Whether the data is a GIF or a WebP, animated or not."""
    return data.startswith((b"GIF87a", b"GIF89a")) or data[8:12] == b"WEBP"


def read_animation(data: bytes, most_frames: int) -> Animation:
    """Reads at most `most_frames` + 1 frames of a GIF or WebP. Raises InvalidMedia,
    UnsupportedMedia."""
    name, read = ("WebP", read_webp) if data[8:12] == b"WEBP" else ("GIF", read_gif)
    try:
        durations, transparent = read(data, most_frames)
    except IndexError:
        raise InvalidMedia(f"the {name} is truncated or corrupt") from None
    if len(durations) < 2:
        raise UnsupportedMedia(f"the {name} is not animated: send it as an image")
    shown = tuple(one if one > LEAST_STEP_MS else UNSAID_MS for one in durations)
    return Animation(shown, transparent)


def read_gif(data: bytes, most_frames: int) -> tuple[list[int], bool]:
    """The duration of each frame in milliseconds, and whether transparent pixels may remain."""
    durations: list[int] = []
    duration, flags, transparent = 0, 0, False  # duration and flags are of the next frame
    at, blocks = 13 + palette_bytes(data[10]), 0
    canvas = [number(data, 6), number(data, 8)]
    while blocks < MOST_BLOCKS:
        if at >= len(data) or data[at] == TRAILER or len(durations) > most_frames:
            return durations, transparent
        kind, at = data[at], at + 1
        if kind == IMAGE:
            cleared = flags >> 2 & 7 == TO_BACKGROUND
            transparent |= bool(flags & 1) and (cleared or not durations)
            durations.append(duration)
            duration, flags = 0, 0
            ends = [number(data, at + i) + number(data, at + i + 4) for i in (0, 2)]
            if ends[0] > canvas[0] or ends[1] > canvas[1]:
                raise InvalidMedia("a frame of the GIF is larger than its header says")
            at, parts = after_blocks(data, at + 10 + palette_bytes(data[at + 8]))
            blocks += parts
        elif kind == EXTENSION:
            if data[at] == CONTROL:
                flags, duration = data[at + 2], 10 * number(data, at + 3)
            at, parts = after_blocks(data, at + 1)
            blocks += parts
        else:
            blocks += 1
    raise InvalidMedia("the GIF has too many blocks")


def palette_bytes(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def number(data: bytes, at: int) -> int:
    return data[at] | data[at + 1] << 8


def after_blocks(data: bytes, at: int) -> tuple[int, int]:
    """The position after a list of sub-blocks, and their number."""
    for parts in range(1, MOST_BLOCKS + 1):
        if not data[at]:
            return at + 1, parts
        at += 1 + data[at]
    return at, MOST_BLOCKS


def read_webp(data: bytes, most_frames: int) -> tuple[list[int], bool]:
    """As `read_gif`."""
    durations: list[int] = []
    transparent, at = False, 12
    end = 8 + int.from_bytes(data[4:8], "little")
    for _ in range(MOST_BLOCKS):
        if at >= end or len(durations) > most_frames:
            return durations, transparent
        kind, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        if kind == b"VP8X":
            transparent = bool(data[at + 8] & 0x10)
        elif kind == b"ANMF":
            durations.append(int.from_bytes(data[at + 20 : at + 23], "little"))
        at += 8 + size + size % 2
        if at > len(data):
            raise IndexError
    raise InvalidMedia("the WebP has too many chunks")
