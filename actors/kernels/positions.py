"""Learned positions, resampled to a grid and added to the embedded patches, in one pass."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def add_positions_kernel(
    x: tl.tensor,
    table: tl.tensor,
    taps: tl.tensor,
    weights: tl.tensor,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One row a program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = x + row * WIDTH + column
    total = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    for tap in tl.static_range(TAPS):
        place = tl.load(taps + row * TAPS + tap).to(tl.int64)
        value = tl.load(table + place * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        total += value * tl.load(weights + row * TAPS + tap)
    tl.store(at, total.to(x.dtype.element_ty), mask=inside)


def add_positions_(x: Tensor, table: Tensor, taps: Tensor, weights: Tensor) -> None:
    """Adds to x [rows, width] the sum of table[taps] x weights over each row's taps, in float32.

    table [positions, width]; taps int32 and weights float32 [rows, taps]. All contiguous.
    """
    rows, width = x.shape
    add_positions_kernel[(rows,)](
        x,
        table,
        taps,
        weights,
        WIDTH=width,
        TAPS=taps.shape[1],
        BLOCK=triton.next_power_of_2(width),
        num_warps=4,
    )
