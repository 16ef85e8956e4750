"""LayerNorm or RMSNorm of a residual stream that lacks a constant: the biases of layers before."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from actors.kernels.native import overlaps

WIDE = 2048
FEW_ROWS = 2048
"""Up to here four rows a program are faster, beyond two (on an H200)."""


@triton.jit  # type: ignore[untyped-decorator]
def norm_kernel(
    x: tl.tensor,
    shift: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    epsilon: tl.tensor,
    CENTRED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """ROWS rows a program. OVERLAPS: begins before the kernel in front of it has ended."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < WIDTH
    mask = inside & (row < rows)
    place = row.to(tl.int64) * WIDTH + column
    constant = tl.load(shift + column, mask=inside, other=0.0)
    by = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    plus = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    if OVERLAPS:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    value = tl.load(x + place, mask=mask, other=0.0).to(tl.float32) + constant
    if CENTRED:
        value -= (tl.sum(value, 1) / WIDTH)[:, None]
    value = tl.where(inside, value, 0.0)
    scale = tl.rsqrt(tl.sum(value * value, 1) / WIDTH + epsilon)[:, None]
    result = value * scale * by + plus
    tl.store(out + place, result.to(out.dtype.element_ty), mask=mask)


def norm(
    x: Tensor, shift: Tensor, weight: Tensor, bias: Tensor, epsilon: float, *, centred: bool
) -> Tensor:
    """LayerNorm (centred) or RMSNorm of x + shift: x [rows, width], shift float32 [width]."""
    rows, width = x.shape
    out = torch.empty_like(x)
    early = overlaps(x.device, rows)
    together, warps = (4, 4) if rows <= FEW_ROWS else (2, 2)
    if width > WIDE:
        together, warps = 1, 8
    norm_kernel[(triton.cdiv(rows, together),)](
        x,
        shift,
        weight,
        bias,
        out,
        rows,
        epsilon,
        CENTRED=centred,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        ROWS=together,
        OVERLAPS=early,
        launch_pdl=early,
        num_warps=warps,
    )
    return out
