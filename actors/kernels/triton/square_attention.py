"""Attention within square windows, with relative positions by row and column, as in SAM.

Windows are not copied: a program reads the patches of its window where they are in the view.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from actors.kernels import LOG2_E
from actors.kernels.triton.attention_kernel import softmax_step

SIDE = 8  # a step takes squares of SIDE x SIDE keys
LARGE = 64  # windows with at least this many patches per side have larger tiles


@triton.jit  # type: ignore[untyped-decorator]
def terms_kernel(
    qkv: tl.tensor,
    tables: tl.tensor,
    terms: tl.tensor,
    unit: tl.tensor,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    VIEW: tl.constexpr,
    WINDOW: tl.constexpr,
    PADDED: tl.constexpr,
    LINE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Computes what relative positions add to the scores, divided by the unit: q of each patch
    times the table of its row in its window (axis 0) or of its column (axis 1).

    A program takes one row or column of a view, whose queries share a table [WINDOW, SIZE]. Those
    of one view and head run together, so that queries are in the L2 cache when they are read for
    the second time."""
    axis, line = tl.program_id(0) // VIEW, tl.program_id(0) % VIEW
    head, view = tl.program_id(1), tl.program_id(2)
    place = tl.arange(0, LINE)
    inside = (place < VIEW)[:, None]
    y, x = tl.where(axis == 0, line, place), tl.where(axis == 0, place, line)
    patch = (view.to(tl.int64) * VIEW * VIEW + y * VIEW + x)[:, None]
    column, key = tl.arange(0, SIZE)[None, :], tl.arange(0, BLOCK)
    q = tl.load(qkv + (patch * 3 * HEADS + head) * SIZE + column, mask=inside, other=0.0)
    at = tables + (axis * WINDOW + line % WINDOW) * WINDOW * SIZE
    table = tl.load(at + key[:, None] * SIZE + column, mask=(key < WINDOW)[:, None], other=0.0)
    term = (tl.dot(q, table.T) / unit).to(terms.dtype.element_ty)
    to = terms + ((patch * HEADS + head) * 2 + axis) * PADDED + key[None, :]
    tl.store(to, term, mask=inside & (key < PADDED)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def attend_squares_kernel(
    qkv: tl.tensor,
    terms: tl.tensor,
    scale: tl.tensor,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    VIEW: tl.constexpr,
    WINDOW: tl.constexpr,
    PADDED: tl.constexpr,
    SIDE: tl.constexpr,
    TILES: tl.constexpr,
    BM: tl.constexpr,
) -> None:
    """A program takes BM queries of one window and head."""
    PER_LINE: tl.constexpr = (VIEW + WINDOW - 1) // WINDOW
    STRIDE: tl.constexpr = 3 * HEADS * SIZE
    dtype = qkv.dtype.element_ty
    tile, item = tl.program_id(0) % TILES, tl.program_id(0) // TILES
    head, window = item % HEADS, item // HEADS
    first = (window // (PER_LINE * PER_LINE)).to(tl.int64) * VIEW * VIEW  # patch of the view
    top = window // PER_LINE % PER_LINE * WINDOW
    left = window % PER_LINE * WINDOW
    # Windows at the edges reach beyond the view. Only patches of the view are queries.
    height, width = tl.minimum(WINDOW, VIEW - top), tl.minimum(WINDOW, VIEW - left)
    if tile * BM < height * width:
        place = tile * BM + tl.arange(0, BM)
        inside = (place < height * width)[:, None]
        patch = (first + (top + place // width) * VIEW + left + place % width)[:, None]
        column = tl.arange(0, SIZE)[None, :]
        q_at = qkv + patch * STRIDE + head * SIZE + column
        q = tl.load(q_at, mask=inside, other=0.0)
        term_at = terms + (patch * HEADS + head) * 2 * PADDED
        # The terms of a step are 2 x SIDE columns. A one-hot matrix adds those of its row and of
        # its column to the score of each key.
        term = tl.arange(0, 2 * SIDE)
        n = tl.arange(0, SIDE * SIDE)
        key_row, key_column = n // SIDE, n % SIDE
        of_key = tl.where(
            term[:, None] < SIDE,
            key_row[None, :] == term[:, None],
            key_column[None, :] == term[:, None] - SIDE,
        ).to(dtype)
        sums = tl.zeros((BM, SIZE), tl.float32)
        most = tl.full((BM,), -1e30, tl.float32)
        total = tl.zeros((BM,), tl.float32)
        for step in range((PADDED // SIDE) * (PADDED // SIDE)):
            row, col = step // (PADDED // SIDE) * SIDE, step % (PADDED // SIDE) * SIDE
            y, x = row + key_row, col + key_column
            at = qkv + (first + (top + y) * VIEW + left + x)[:, None] * STRIDE + column
            if VIEW % WINDOW == 0 and WINDOW % SIDE == 0:
                k = tl.load(at + (HEADS + head) * SIZE)
                v = tl.load(at + (2 * HEADS + head) * SIZE)
            else:
                # Keys beyond the view take part, with k and v of zero, because SAM pads with zeros.
                known = ((top + y < VIEW) & (left + x < VIEW))[:, None]
                k = tl.load(at + (HEADS + head) * SIZE, mask=known, other=0.0)
                v = tl.load(at + (2 * HEADS + head) * SIZE, mask=known, other=0.0)
            place_of_term = tl.where(term < SIDE, row + term, PADDED + col + term - SIDE)
            terms_of_step = tl.load(term_at + place_of_term[None, :], mask=inside, other=0.0)
            scores = tl.dot(terms_of_step, of_key, tl.dot(q, k.T))
            if WINDOW % SIDE:
                scores = tl.where(((y < WINDOW) & (x < WINDOW))[None, :], scores, -1e30)
            weights, decay, most, total = softmax_step(scores, most, total, scale)
            sums = tl.dot(weights.to(dtype), v, sums * decay[:, None])
        tl.store(q_at, (sums / total[:, None]).to(dtype), mask=inside)


def position_terms(qkv: Tensor, tables: Tensor, side: int, unit: float) -> Tensor:
    """What relative positions add to the scores, divided by `unit`: [views x side ** 2, heads, 2,
    window rounded up to SIDE]: for the rows of the query's window, and for its columns. Other
    arguments: see attend_squares_."""
    rows, _, heads, size = qkv.shape
    window = tables.shape[1]
    padded = triton.cdiv(window, SIDE) * SIDE
    terms = qkv.new_empty(rows, heads, 2, padded)
    terms_kernel[(2 * side, heads, rows // side**2)](
        qkv,
        tables,
        terms,
        unit,
        HEADS=heads,
        SIZE=size,
        VIEW=side,
        WINDOW=window,
        PADDED=padded,
        LINE=max(16, triton.next_power_of_2(side)),
        BLOCK=max(16, triton.next_power_of_2(padded)),
        num_warps=4,
    )
    return terms


def attend_squares_(qkv: Tensor, tables: Tensor, side: int) -> Tensor:
    """Attention of qkv [views x side ** 2, 3, heads, head size], contiguous, 16-bit. Overwrites q.

    Returns q as [views x side ** 2, heads x head size], without a copy. Each view is cut into
    windows from its top left corner. `tables` [2, window, window, head size]: for the rows of query
    and key, and for their columns. Head size: a power of two from 16 to 128.
    """
    rows, _, heads, size = qkv.shape
    window, scale = tables.shape[1], size**-0.5
    terms = position_terms(qkv, tables, side, scale)  # attention multiplies whole scores by it
    queries = 128 if window >= LARGE else 64
    tiles = triton.cdiv(window**2, queries)
    windows = rows // side**2 * triton.cdiv(side, window) ** 2
    attend_squares_kernel[(windows * heads * tiles,)](
        qkv,
        terms,
        scale * LOG2_E,
        HEADS=heads,
        SIZE=size,
        VIEW=side,
        WINDOW=window,
        PADDED=terms.shape[-1],
        SIDE=SIDE,
        TILES=tiles,
        BM=queries,
        num_warps=queries // 16,
        num_stages=3,
    )
    return qkv.view(rows, -1)[:, : heads * size]
