"""A residual stream and the constant that it lacks, added in one pass."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ROWS = 4


@triton.jit  # type: ignore[untyped-decorator]
def shift_kernel(
    x: tl.tensor,
    shift: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """ROWS rows a program."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (column < WIDTH) & (row < rows)
    place = row.to(tl.int64) * WIDTH + column
    value = tl.load(x + place, mask=mask).to(tl.float32)
    value += tl.load(shift + column, mask=column < WIDTH)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=mask)


def shifted(x: Tensor, shift: Tensor, out: Tensor) -> Tensor:
    """x + shift into `out`, which may be x: x, out [rows, width] contiguous, shift float32."""
    rows, width = x.shape
    shift_kernel[(triton.cdiv(rows, ROWS),)](
        x,
        shift,
        out,
        rows,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        ROWS=ROWS,
        num_warps=4,
    )
    return out
