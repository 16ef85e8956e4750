"""Rotary embedding of queries and keys, in place in the packed qkv."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from actors.kernels.native import overlaps

BLOCK = 1024


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
    """BLOCK pairs a program, counted through rows, q and k, heads, and the half head.

    OVERLAPS: begins before the kernel in front of it has ended.
    """
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
    """Rotates q, k of qkv [rows, 3, heads, head size]; cos, sin float32 [rows, head size / 2]."""
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
