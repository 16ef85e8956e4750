"""The weights by which pixels are resampled: torch's own for uint8 with antialiasing, in integers.

torch resamples uint8 on the CPU in two passes, each in integers of 16 bits and rounded to uint8
(Pillow's way). The same integers give the same pixels on any device. Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Resample = Literal["bicubic", "bilinear"]
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int32]

KEYS = -0.5
"""The parameter of the bicubic kernel, as Pillow has it, and torch with antialiasing."""

MOST_BITS = 22
"""Of a weight's fraction."""


@dataclass(frozen=True, slots=True)
class Taps:
    """What each target pixel of one axis is made of.

    clamp((sum(weights * pixels[first:]) + half) >> bits), where half is 1 << (bits - 1).
    """

    first: Integers
    """[target]: the source pixel that the first weight is for."""
    weights: Integers
    """[target, taps], of 16 bits; zero where a target has fewer, also beyond the last source."""
    bits: int


def taps(source: int, target: int, resample: Resample) -> Taps:
    """Of an axis of `source` pixels that becomes `target` pixels long.

    Operation for operation as ATen's UpSampleKernel.cpp.
    """
    kernel, width = KERNELS[resample]
    scale = source / target
    stretched = max(scale, 1.0)
    support = width * 0.5 * stretched
    most = int(np.ceil(np.float32(support))) * 2 + 1
    centre = scale * (np.arange(target) + 0.5)
    first = np.maximum((centre - support + 0.5).astype(np.int64), 0)
    end = np.minimum((centre + support + 0.5).astype(np.int64), source)
    count = np.clip(end - first, 0, most)
    place = np.arange(most)
    values = kernel((place + first[:, None] - centre[:, None] + 0.5) * (1.0 / stretched))
    values[place >= count[:, None]] = 0.0
    values /= values.cumsum(1)[:, -1:]  # added up one by one: numpy's sum would go pairwise
    bits = fraction_bits(float(values.max()))
    scaled = values * (1 << bits)
    rounded = np.trunc(scaled + np.copysign(0.5, scaled))
    return Taps(first.astype(np.int32), rounded.astype(np.int32), bits)


def fraction_bits(largest: float) -> int:
    """As many as leave the largest weight within 16 bits."""
    bits = 0
    while bits < MOST_BITS and int(0.5 + largest * (1 << (bits + 1))) < 1 << 15:
        bits += 1
    return bits


def bicubic(distance: Floats) -> Floats:
    """Keys' kernel, two pixels to each side."""
    x = np.abs(distance)
    near = ((KEYS + 2) * x - (KEYS + 3)) * x * x + 1
    far = ((KEYS * x - 5 * KEYS) * x + 8 * KEYS) * x - 4 * KEYS
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def bilinear(distance: Floats) -> Floats:
    """A tent, one pixel to each side."""
    return np.maximum(1.0 - np.abs(distance), 0.0)


KERNELS: dict[Resample, tuple[Callable[[Floats], Floats], int]] = {
    "bicubic": (bicubic, 4),
    "bilinear": (bilinear, 2),
}
"""And how many pixels wide each is."""
