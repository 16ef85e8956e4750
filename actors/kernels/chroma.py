"""The colours of a JPEG between its samples of chroma, as libjpeg has them.

nvJPEG through torchvision gives each pixel the nearest sample. With the luma beside the pixels the
samples are found again, and libjpeg's own steps taken in integers: a triangle filter, the colours.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256
"""Samples, or pixels, of a program: with more a compilation takes many times as long."""

ALIGNED_BYTES = 16
"""Of a pointer that Triton takes for aligned."""

SIZES = ("width", "height", "columns", "rows")


@triton.jit  # type: ignore[untyped-decorator]
def cut_off(value: tl.tensor) -> tl.tensor:
    """To uint8."""
    return tl.minimum(tl.maximum(value, 0), 255).to(tl.uint8)


@triton.jit  # type: ignore[untyped-decorator]
def sampled(
    colours: tl.tensor,
    luma: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    width: tl.tensor,
    height: tl.tensor,
    wanted: tl.tensor,
    SCALE: tl.constexpr,
    ACROSS: tl.constexpr,
    DOWN: tl.constexpr,
) -> tl.tensor:
    """The samples that made red (or blue): from pixels that are not cut off at 0 or 255, if any."""
    known = row < 0
    exact = row * 0
    least, most = exact - 1000, exact + 1000
    for down in tl.static_range(DOWN):
        for across in tl.static_range(ACROSS):
            y = tl.minimum(row * DOWN + down, height - 1)
            x = tl.minimum(column * ACROSS + across, width - 1)
            colour = tl.load(colours + y * width + x, mask=wanted, other=0).to(tl.int32)
            beyond = colour - tl.load(luma + y * width + x, mask=wanted, other=0).to(tl.int32)
            inside = (colour > 0) & (colour < 255)
            exact = tl.where(inside, beyond, exact)
            known = known | inside
            least = tl.where(colour == 255, tl.maximum(least, beyond), least)
            most = tl.where(colour == 0, tl.minimum(most, beyond), most)
    beyond = tl.where(known, exact, tl.where(least > -1000, least, most))
    return cut_off(tl.floor(beyond.to(tl.float32) / SCALE + 128.5).to(tl.int32))


@triton.jit(do_not_specialize=[*SIZES])  # type: ignore[untyped-decorator]
def samples_kernel(
    image: tl.tensor,
    luma: tl.tensor,
    blue: tl.tensor,
    red: tl.tensor,
    width: tl.tensor,
    height: tl.tensor,
    columns: tl.tensor,
    rows: tl.tensor,
    ACROSS: tl.constexpr,
    DOWN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """image [3, height, width] and luma [height, width] to the samples [rows, columns] of both."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wanted = place < rows * columns
    row = place // columns
    column = place - row * columns
    plane = width * height
    found = sampled(image, luma, row, column, width, height, wanted, 1.402, ACROSS, DOWN)
    tl.store(red + place, found, mask=wanted)
    image += 2 * plane
    found = sampled(image, luma, row, column, width, height, wanted, 1.772, ACROSS, DOWN)
    tl.store(blue + place, found, mask=wanted)


@triton.jit  # type: ignore[untyped-decorator]
def between(
    samples: tl.tensor,
    y: tl.tensor,
    x: tl.tensor,
    columns: tl.tensor,
    rows: tl.tensor,
    wanted: tl.tensor,
    DOWN: tl.constexpr,
) -> tl.tensor:
    """libjpeg's h2v1_fancy_upsample and h2v2_fancy_upsample, less 128."""
    column = x // 2
    odd = x % 2
    beside = tl.minimum(tl.maximum(column - 1 + 2 * odd, 0), columns - 1)
    row = y // DOWN
    near = tl.load(samples + row * columns + column, mask=wanted, other=0).to(tl.int32)
    far = tl.load(samples + row * columns + beside, mask=wanted, other=0).to(tl.int32)
    if DOWN == 1:
        value = (3 * near + far + 1 + odd) >> 2
    else:
        other = tl.minimum(tl.maximum(row - 1 + 2 * (y % 2), 0), rows - 1) * columns
        near = 3 * near + tl.load(samples + other + column, mask=wanted, other=0).to(tl.int32)
        far = 3 * far + tl.load(samples + other + beside, mask=wanted, other=0).to(tl.int32)
        value = (3 * near + far + 8 - odd) >> 4
    return value - 128


@triton.jit(do_not_specialize=[*SIZES])  # type: ignore[untyped-decorator]
def colours_kernel(
    target: tl.tensor,
    luma: tl.tensor,
    blue: tl.tensor,
    red: tl.tensor,
    width: tl.tensor,
    height: tl.tensor,
    columns: tl.tensor,
    rows: tl.tensor,
    DOWN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """luma [height, width] and samples to target [3, height, width]: libjpeg's ycc_rgb_convert."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    plane = width * height
    wanted = place < plane
    y = place // width
    x = place - y * width
    light = tl.load(luma + place, mask=wanted, other=0).to(tl.int32)
    cb = between(blue, y, x, columns, rows, wanted, DOWN)
    cr = between(red, y, x, columns, rows, wanted, DOWN)
    green = light + ((32768 - 22554 * cb - 46802 * cr) >> 16)
    tl.store(target + place, cut_off(light + ((91881 * cr + 32768) >> 16)), mask=wanted)
    tl.store(target + plane + place, cut_off(green), mask=wanted)
    tl.store(
        target + 2 * plane + place, cut_off(light + ((116130 * cb + 32768) >> 16)), mask=wanted
    )


def smoothed(image: Tensor, luma: Tensor, down: int) -> Tensor:
    """uint8 [3, height, width] by nearest samples, each for 2 x `down` pixels, to libjpeg's.

    `luma` uint8 [1, height, width]. Where every pixel of a sample is cut off at 0 or 255 the sample
    is taken to be the one nearest to grey.
    """
    _, height, width = image.shape
    image, luma = image.contiguous(), luma.contiguous()
    columns, rows = -(-width // 2), -(-height // down)
    # Both begin where Triton expects it: it would compile once more for one that does not.
    plane = -(-rows * columns // ALIGNED_BYTES) * ALIGNED_BYTES
    blue, red = torch.empty(2, plane, dtype=torch.uint8, device=image.device)
    sizes = (width, height, columns, rows)
    samples_kernel[(triton.cdiv(rows * columns, BLOCK),)](
        image, luma, blue, red, *sizes, ACROSS=2, DOWN=down, BLOCK=BLOCK
    )
    target = torch.empty_like(image)
    colours_kernel[(triton.cdiv(width * height, BLOCK),)](
        target, luma, blue, red, *sizes, DOWN=down, BLOCK=BLOCK
    )
    return target
