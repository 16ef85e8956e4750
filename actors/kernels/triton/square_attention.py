"""Attention within squares of patches, with relative positions by row and column, as SAM has it."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from actors.kernels.triton.attention_kernel import softmax_step

KEYS = 64  # per step: a row of 64, or 8 x 8


@triton.jit  # type: ignore[untyped-decorator]
def terms_kernel(
    qkv: tl.tensor,
    tables: tl.tensor,
    terms: tl.tensor,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    VIEW: tl.constexpr,
    WINDOW: tl.constexpr,
    PADDED: tl.constexpr,
    LINE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A row of a view (axis 0), or a column: its queries share a table, [WINDOW, SIZE]."""
    head, axis = tl.program_id(1), tl.program_id(2)
    view, line = tl.program_id(0) // VIEW, tl.program_id(0) % VIEW
    place = tl.arange(0, LINE)
    inside = (place < VIEW)[:, None]
    y, x = tl.where(axis == 0, line, place), tl.where(axis == 0, place, line)
    row = (view.to(tl.int64) * VIEW * VIEW + y * VIEW + x)[:, None]
    column, key = tl.arange(0, SIZE)[None, :], tl.arange(0, BLOCK)
    q = tl.load(qkv + (row * 3 * HEADS + head) * SIZE + column, mask=inside, other=0.0)
    at = tables + (axis * WINDOW + line % WINDOW) * WINDOW * SIZE
    by = tl.load(at + key[:, None] * SIZE + column, mask=(key < WINDOW)[:, None], other=0.0)
    # Attention multiplies scores by the scale, so these are divided by it.
    result = (tl.dot(q, by.T) * SIZE**0.5).to(terms.dtype.element_ty)
    to = terms + ((row * HEADS + head) * 2 + axis) * PADDED + key[None, :]
    tl.store(to, result, mask=inside & (key < PADDED)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def square_kernel(
    qkv: tl.tensor,
    terms: tl.tensor,
    blocks: tl.tensor,
    scale: tl.tensor,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    VIEW: tl.constexpr,
    WINDOW: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCKS: tl.constexpr,
    SIDE: tl.constexpr,
    TILES: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    TMA: tl.constexpr,
    MODE: tl.constexpr,
) -> None:
    COUNT: tl.constexpr = (VIEW + WINDOW - 1) // WINDOW
    STRIDE: tl.constexpr = 3 * HEADS * SIZE
    dtype = qkv.dtype.element_ty
    tile, item = tl.program_id(0) % TILES, tl.program_id(0) // TILES
    head, square = item % HEADS, item // HEADS
    view = (square // (COUNT * COUNT)).to(tl.int64) * VIEW * VIEW
    top, left = square // COUNT % COUNT * WINDOW, square % COUNT * WINDOW
    height, width = tl.minimum(WINDOW, VIEW - top), tl.minimum(WINDOW, VIEW - left)
    if tile * BM < height * width:
        place = tile * BM + tl.arange(0, BM)
        if WINDOW < VIEW:
            row = view + (top + place // width) * VIEW + left + place % width
        else:
            row = view + place
        inside = (place < height * width)[:, None]
        column = tl.arange(0, SIZE)[None, :]
        q_at = qkv + row[:, None] * STRIDE + head * SIZE + column
        q = tl.load(q_at, mask=inside, other=0.0)
        term_at = terms + (row * HEADS + head)[:, None] * 2 * PADDED
        acc = tl.zeros((BM, SIZE), tl.float32)
        top_score = tl.full((BM,), -1e30, tl.float32)
        total = tl.zeros((BM,), tl.float32)
        n = tl.arange(0, BN)
        if MODE == "row":
            by_column = tl.load(term_at + PADDED + n[None, :], mask=inside, other=0.0).to(tl.float32)
            for y in range(VIEW):
                if TMA:
                    start = (view + y * VIEW).to(tl.int32)
                    k = blocks.load([start, (HEADS + head) * SIZE])
                    v = blocks.load([start, (2 * HEADS + head) * SIZE])
                else:
                    at = qkv + (view + y * VIEW + n)[:, None] * STRIDE + column
                    k = tl.load(at + (HEADS + head) * SIZE)
                    v = tl.load(at + (2 * HEADS + head) * SIZE)
                by_row = tl.load(terms + (row * HEADS + head) * 2 * PADDED + y, mask=place < height * width, other=0.0)
                scores = tl.dot(q, k.T, by_column)
                weights, decay, top_score, total = softmax_step(scores, top_score - by_row.to(tl.float32), total, scale)
                top_score += by_row.to(tl.float32)
                acc = tl.dot(weights.to(dtype), v, acc * decay[:, None])
        else:
            r, c = n // SIDE, n % SIDE
            j = tl.arange(0, 16)
            e = tl.where(j[:, None] < SIDE, r[None, :] == j[:, None], c[None, :] == j[:, None] - SIDE).to(dtype)
            for block in range(BLOCKS * BLOCKS):
                by, bx = block // BLOCKS * SIDE, block % BLOCKS * SIDE
                y, x = by + r, bx + c
                at = qkv + (view + (top + y) * VIEW + left + x)[:, None] * STRIDE + column
                if VIEW % WINDOW == 0 and WINDOW % SIDE == 0:
                    k = tl.load(at + (HEADS + head) * SIZE)
                    v = tl.load(at + (2 * HEADS + head) * SIZE)
                else:
                    known = ((top + y < VIEW) & (left + x < VIEW))[:, None]
                    k = tl.load(at + (HEADS + head) * SIZE, mask=known, other=0.0)
                    v = tl.load(at + (2 * HEADS + head) * SIZE, mask=known, other=0.0)
                scores = tl.dot(q, k.T)
                if MODE == "dot":
                    term = tl.load(term_at + tl.where(j < SIDE, by + j, PADDED + bx + j - SIDE)[None, :], mask=inside, other=0.0)
                    scores = tl.dot(term, e, scores)
                else:
                    s = tl.arange(0, SIDE)[None, :]
                    by_row = tl.load(term_at + by + s, mask=inside, other=0.0).to(tl.float32)
                    by_column = tl.load(term_at + PADDED + bx + s, mask=inside, other=0.0).to(tl.float32)
                    scores = tl.reshape(scores, (BM, SIDE, SIDE)) + by_row[:, :, None] + by_column[:, None, :]
                    scores = tl.reshape(scores, (BM, BN))
                if WINDOW % SIDE:
                    scores = tl.where(((y < WINDOW) & (x < WINDOW))[None, :], scores, -1e30)
                weights, decay, top_score, total = softmax_step(scores, top_score, total, scale)
                acc = tl.dot(weights.to(dtype), v, acc * decay[:, None])
        tl.store(q_at, (acc / total[:, None]).to(dtype), mask=inside)


def attend_squares_(qkv: Tensor, tables: Tensor, side: int, **tuning: Any) -> Tensor:
    """Attention of qkv [views x side ** 2, 3, heads, size], contiguous, 16-bit, written over its q.

    Each view is cut into windows ... tables [2, window, window, size].
    """
    rows, _, heads, size = qkv.shape
    window = tables.shape[1]
    padded = -(-window // 8) * 8
    line = triton.next_power_of_2(side)
    terms = qkv.new_empty(rows, heads, 2, padded)
    terms_kernel[(rows // side, heads, 2)](
        qkv, tables, terms, HEADS=heads, SIZE=size, VIEW=side, WINDOW=window, PADDED=padded, LINE=max(16, line),
        BLOCK=max(16, triton.next_power_of_2(padded)), num_warps=4,
    )
    capability = torch.cuda.get_device_capability(qkv.device)
    windows = (rows // side**2) * (-(-side // window)) ** 2
    mode = tuning.pop("mode", "row" if window == side == KEYS else "dot")
    queries = tuning.pop("queries", 128 if window == side else 64)
    tiles = triton.cdiv(window**2, queries)
    flat = qkv.view(rows, -1)
    tma = tuning.pop("tma", capability >= (9, 0)) and mode == "row"
    square_kernel[(windows * heads * tiles,)](
        qkv, terms, TensorDescriptor.from_tensor(flat, [KEYS, size]) if tma else qkv, size**-0.5 * 1.4426950408889634,
        HEADS=heads, SIZE=size, VIEW=side, WINDOW=window, PADDED=padded, BLOCKS=padded // 8, SIDE=8, TILES=tiles, BM=queries, BN=KEYS, TMA=tma, MODE=mode,
        num_warps=tuning.pop("warps", queries // 16), num_stages=tuning.pop("stages", 3), **tuning,
    )
    return flat[:, : heads * size]
