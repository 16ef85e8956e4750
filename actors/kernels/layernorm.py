"""LayerNorm over a residual stream that lacks a constant: the biases of the layers before it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 4


@triton.jit  # type: ignore[untyped-decorator]
def layer_norm_kernel(
    x: tl.tensor,
    shift: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    epsilon: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """ROWS rows a program."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < WIDTH
    mask = inside & (row < rows)
    place = row.to(tl.int64) * WIDTH + column
    value = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    value += tl.load(shift + column, mask=inside, other=0.0)
    centred = tl.where(inside, value - (tl.sum(value, 1) / WIDTH)[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 1) / WIDTH + epsilon)[:, None]
    result = centred * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    result += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=mask)


def layer_norm(x: Tensor, shift: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """LayerNorm of x + shift: x [rows, width] contiguous, shift float32 [width]."""
    rows, width = x.shape
    out = torch.empty_like(x)
    layer_norm_kernel[(triton.cdiv(rows, ROWS),)](
        x,
        shift,
        weight,
        bias,
        out,
        rows,
        epsilon,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        ROWS=ROWS,
        num_warps=4,
    )
    return out
