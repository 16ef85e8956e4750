"""Antialiased resizing of uint8 images, in integers: bit for bit what torch does on the CPU."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from actors.media.resample import Resample, taps
from actors.types import Size

BLOCK = 1024
"""Pixels of a program."""

SIZES = ("source_length", "target_length", "inner", "count", "tap_count", "bits")

CACHED_AXES = 512
"""Tables that stay on the device: a few kilobytes for each pair of lengths."""


# One form for all sizes: a compilation takes a second, and sizes are the clients'.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[*SIZES], do_not_specialize_on_alignment=["source", "target"]
)
def resample_kernel(
    source: tl.tensor,
    target: tl.tensor,
    first: tl.tensor,
    weights: tl.tensor,
    source_length: tl.tensor,
    target_length: tl.tensor,
    inner: tl.tensor,
    count: tl.tensor,
    tap_count: tl.tensor,
    bits: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """source [outer, source_length, inner] to target [outer, target_length, inner], both uint8."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wanted = place < count
    line = place // inner
    outer = line // target_length
    row = line - outer * target_length
    begin = tl.load(first + row, mask=wanted, other=0)
    at = source + (outer * source_length + begin) * inner + (place - line * inner)
    total = tl.zeros([BLOCK], tl.int32) + (1 << (bits - 1))
    for tap in range(tap_count):
        inside = wanted & (begin + tap < source_length)
        pixel = tl.load(at + tap * inner, mask=inside, other=0).to(tl.int32)
        total += pixel * tl.load(weights + row * tap_count + tap, mask=wanted, other=0)
    rounded = tl.minimum(tl.maximum(total >> bits, 0), 255)
    tl.store(target + place, rounded.to(tl.uint8), mask=wanted)


def resize(image: Tensor, size: Size, resample: Resample) -> Tensor:
    """uint8 [3, height, width] on the device to another height and width: see packed.resize."""
    channels, height, width = image.shape
    if width != size.width:
        rows = image.reshape(channels * height, width, 1)
        image = resampled(rows, size.width, resample).view(channels, height, size.width)
    if height != size.height:
        image = resampled(image.contiguous(), size.height, resample)
    return image


def resampled(lines: Tensor, length: int, resample: Resample) -> Tensor:
    """uint8 [outer, source length, inner], contiguous, to [outer, length, inner]."""
    outer, source_length, inner = lines.shape
    first, weights, bits = table(source_length, length, resample, lines.device)
    target = lines.new_empty(outer, length, inner)
    resample_kernel[(triton.cdiv(target.numel(), BLOCK),)](
        lines,
        target,
        first,
        weights,
        source_length,
        length,
        inner,
        target.numel(),
        weights.shape[1],
        bits,
        BLOCK=BLOCK,
    )
    return target


@lru_cache(CACHED_AXES)
def table(
    source: int, target: int, resample: Resample, device: torch.device
) -> tuple[Tensor, Tensor, int]:
    """See Taps: first pixels, weights, bits."""
    found = taps(source, target, resample)
    first, weights = torch.from_numpy(found.first), torch.from_numpy(found.weights)
    return first.to(device), weights.to(device), found.bits
