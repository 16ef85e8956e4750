"""What runs between the GEMMs of a block, each in one pass: norm, rotary, activation, additions.

On short sequences, norm and rotary start before the previous kernel has finished; see `overlaps`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from actors.kernels import GATED
from actors.kernels.gemm.fp8 import Fp8Matrix, Matrix, values
from actors.kernels.hopper.cuda import overlaps

BLOCK = 1024  # columns or pairs per program

WIDE = 2048  # norms of wider rows take one row per program
NORM_ROWS = 2048
"""Norms of up to this many rows are fastest with four rows per program, others with one (H200)."""
SHIFT_ROWS = 4


@triton.jit  # type: ignore[untyped-decorator]
def norm_kernel(
    x: tl.tensor,
    shift: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    scales: tl.tensor,
    epsilon: tl.tensor,
    CENTRED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    FP8: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """ROWS rows per program."""
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
    to = out + place
    if FP8:
        result *= tl.load(scales)
        # Stored as it was loaded: wider stores would take an exchange in shared memory.
        to = tl.max_contiguous(tl.multiple_of(to, (1, 8)), (1, 8))
    tl.store(to, result.to(out.dtype.element_ty), mask=mask)


def norm(
    x: Tensor,
    shift: Tensor,
    weight: Tensor,
    bias: Tensor,
    epsilon: float,
    *,
    centred: bool,
    scales: Tensor | None = None,
) -> Matrix:
    """LayerNorm (centred) or RMSNorm of x + shift: x [rows, width], shift float32 [width].
    `scales`: [1], if the result is in FP8."""
    rows, width = x.shape
    out = empty(x, width, scales)
    early = overlaps(x.device, rows)
    together, warps = (4, 4) if rows <= NORM_ROWS else (1, 1)
    if width > WIDE:
        together, warps = 1, 8
    norm_kernel[(triton.cdiv(rows, together),)](
        x,
        shift,
        weight,
        bias,
        values(out),
        rows,
        x if scales is None else scales,
        epsilon,
        CENTRED=centred,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        ROWS=together,
        FP8=scales is not None,
        OVERLAPS=early,
        launch_pdl=early,
        num_warps=warps,
    )
    return out


def empty(x: Tensor, width: int, scales: Tensor | None) -> Matrix:
    """As many rows as x, uninitialised; in FP8 if there are scales."""
    dtype = x.dtype if scales is None else torch.float8_e4m3fn
    made = torch.empty(len(x), width, dtype=dtype, device=x.device)
    return made if scales is None else Fp8Matrix(made, scales)


@triton.jit  # type: ignore[untyped-decorator]
def rotate_kernel(
    qkv: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    pairs: tl.tensor,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """BLOCK pairs per program, counted through rows, q and k, heads, and the half head."""
    if OVERLAPS:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    pair = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = pair < pairs
    column = pair % HALF
    row = pair // (2 * HEADS * HALF)
    head = (pair // HALF) % (2 * HEADS)
    first = qkv + (row * 3 * HEADS + head) * 2 * HALF + column
    a = tl.load(first, mask=mask).to(tl.float32)
    b = tl.load(first + HALF, mask=mask).to(tl.float32)
    c = tl.load(cos + row * HALF + column, mask=mask)
    s = tl.load(sin + row * HALF + column, mask=mask)
    tl.store(first, (a * c - b * s).to(qkv.dtype.element_ty), mask=mask)
    tl.store(first + HALF, (b * c + a * s).to(qkv.dtype.element_ty), mask=mask)


def rotate_(qkv: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotates q and k of qkv [rows, 3, heads, head size] in place; cos, sin float32 [rows, head
    size / 2]."""
    rows, _, heads, size = qkv.shape
    pairs, early = rows * heads * size, overlaps(qkv.device, rows)
    rotate_kernel[(triton.cdiv(pairs, BLOCK),)](
        qkv,
        cos,
        sin,
        pairs,
        HEADS=heads,
        HALF=size // 2,
        BLOCK=BLOCK,
        OVERLAPS=early,
        launch_pdl=early,
        num_warps=8,
    )


@triton.jit  # type: ignore[untyped-decorator]
def activate_kernel(
    x: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    width: tl.tensor,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """BLOCK columns of a row per program. SCALES: none (0), one (1), or one per column (2)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = x + row * (2 if GATED else 1) * width + column
    a = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "swiglu_10":
        a = tl.minimum(a, 10.0)
    if ACTIVATION == "gelu":
        a = 0.5 * a * (1 + tl.erf(a * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh" or ACTIVATION == "geglu_tanh":
        # (1 + tanh(z)) / 2 is the sigmoid of 2z.
        a = a * tl.sigmoid(1.5957691216057308 * (a + 0.044715 * a * a * a))
    elif ACTIVATION == "quick_gelu":
        a = a * tl.sigmoid(1.702 * a)
    else:
        tl.static_assert(ACTIVATION == "swiglu" or ACTIVATION == "swiglu_10")
        a = a * tl.sigmoid(a)
    if GATED:
        up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
        a *= tl.clamp(up, -10.0, 10.0) if ACTIVATION == "swiglu_10" else up
    if SCALES == 1:
        a *= tl.load(scales)
    elif SCALES == 2:
        a *= tl.load(scales + column, mask=inside)
    tl.store(out + row * width + column, a.to(out.dtype.element_ty), mask=inside)


def activated(x: Tensor, activation: str, scales: Tensor | None = None) -> Matrix:
    """The activation of x [rows, width], contiguous, or of a gated one [rows, 2 x width], gate
    before up, to [rows, width]. `scales`: [1] or [width], if the result is in FP8."""
    gated = activation in GATED
    rows, width = len(x), x.shape[1] // (2 if gated else 1)
    out = empty(x, width, scales)
    activate_kernel[(rows, triton.cdiv(width, BLOCK))](
        x,
        values(out),
        x if scales is None else scales,
        width,
        ACTIVATION=activation,
        GATED=gated,
        SCALES=0 if scales is None else min(len(scales), 2),
        BLOCK=BLOCK,
        num_warps=4,
    )
    return out


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
    """ROWS rows per program."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (column < WIDTH) & (row < rows)
    place = row.to(tl.int64) * WIDTH + column
    value = tl.load(x + place, mask=mask).to(tl.float32)
    value += tl.load(shift + column, mask=column < WIDTH)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=mask)


def shifted(x: Tensor, shift: Tensor, out: Tensor) -> Tensor:
    """Writes x + shift to `out`, which may be x. x, out [rows, width] contiguous, shift float32."""
    rows, width = x.shape
    shift_kernel[(triton.cdiv(rows, SHIFT_ROWS),)](
        x,
        shift,
        out,
        rows,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        ROWS=SHIFT_ROWS,
        num_warps=4,
    )
    return out


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
    """One row per program."""
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
    """Adds learned positions, resampled to a grid: the weighted sum of table[taps], in float32.

    x [rows, width], table [positions, width]; taps int32 and weights float32 [rows, taps]. All
    contiguous.
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
