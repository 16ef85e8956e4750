"""The kernel of TritonAttention: attention within segments, over a table of query tiles. Programs
beyond the table's count of tiles exit at once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from actors.kernels import LOG2_E

KEYS = 64  # rows of keys per step


@triton.jit  # type: ignore[untyped-decorator]
def softmax_step(
    scores: tl.tensor, top: tl.tensor, total: tl.tensor, scale: tl.tensor
) -> tl.tensor:
    """One step of the online softmax: weights, decay of earlier sums, new maximum, new total."""
    new = tl.maximum(top, tl.max(scores, 1))
    decay = tl.exp2((top - new) * scale)
    weights = tl.exp2(scores * scale - (new * scale)[:, None])
    return weights, decay, new, total * decay + tl.sum(weights, 1)


@triton.jit  # type: ignore[untyped-decorator]
def attend_kernel(
    qkv: tl.tensor,
    table: tl.tensor,
    wide: tl.tensor,
    narrow_k: tl.tensor,
    narrow_v: tl.tensor,
    scale: tl.tensor,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    D0: tl.constexpr,
    K1: tl.constexpr,
    V1: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    TMA: tl.constexpr,
) -> None:
    """A head is split into D0 columns and a rest, so that sizes between powers of two waste little.
    The rest is K1 for q and k (the depth of a GEMM is at least 16), V1 for v (its width may be 8).

    TMA: descriptors read whole blocks of keys and values. They are not used on chips without TMA,
    where Triton emulates them with more registers than there are."""
    stride = 3 * HEADS * SIZE
    dtype = qkv.dtype.element_ty
    item = tl.program_id(0)
    if item < tl.load(table) * HEADS:
        entry = table + 4 * (1 + item // HEADS)
        start, end = tl.load(entry), tl.load(entry + 1)
        first, tiles = tl.load(entry + 2), tl.load(entry + 3)
        head = (item - first * HEADS) // tiles
        # All tiles of a head come before the next head, so that its k and v stay in L2.
        row = start + (item - first * HEADS) % tiles * BM + tl.arange(0, BM)
        inside = (row < end)[:, None]
        c0 = tl.arange(0, D0)[None, :]
        q_at = qkv + row.to(tl.int64)[:, None] * stride + head * SIZE
        q0 = tl.load(q_at + c0, mask=inside, other=0.0)
        acc0 = tl.zeros((BM, D0), tl.float32)
        if V1 > 0:
            c1 = D0 + tl.arange(0, K1)[None, :]
            q1 = tl.load(q_at + c1, mask=inside & (c1 < SIZE), other=0.0)
            acc1 = tl.zeros((BM, V1), tl.float32)
            d1 = D0 + tl.arange(0, V1)[None, :]
        top = tl.full((BM,), -1e30, tl.float32)
        total = tl.zeros((BM,), tl.float32)
        k_column = (HEADS + head) * SIZE
        v_column = (2 * HEADS + head) * SIZE
        whole = start + (end - start) // BN * BN
        for n in range(start, whole, BN):
            at = qkv + (n + tl.arange(0, BN)).to(tl.int64)[:, None] * stride
            k0 = wide.load([n, k_column]) if TMA else tl.load(at + k_column + c0)
            scores = tl.dot(q0, k0.T)
            if V1 > 0:
                # Columns beyond the head belong to the next one; q1 is zero there.
                k1 = narrow_k.load([n, k_column + D0]) if TMA else tl.load(at + k_column + c1)
                scores = tl.dot(q1, k1.T, scores)
            weights, decay, top, total = softmax_step(scores, top, total, scale)
            p = weights.to(dtype)
            v0 = wide.load([n, v_column]) if TMA else tl.load(at + v_column + c0)
            acc0 = tl.dot(p, v0, acc0 * decay[:, None])
            if V1 > 0:
                if TMA:
                    v1 = narrow_v.load([n, v_column + D0])
                else:
                    v1 = tl.load(at + v_column + d1, mask=d1 < SIZE, other=0.0)
                acc1 = tl.dot(p, v1, acc1 * decay[:, None])
        if whole < end:
            key = whole + tl.arange(0, BN)
            real = key < end
            at = qkv + key.to(tl.int64)[:, None] * stride
            # Masked rather than weighted with zero, because the rows beyond may hold NaN.
            k0 = tl.load(at + k_column + c0, mask=real[:, None], other=0.0)
            v0 = tl.load(at + v_column + c0, mask=real[:, None], other=0.0)
            scores = tl.dot(q0, k0.T)
            if V1 > 0:
                k1 = tl.load(at + k_column + c1, mask=real[:, None] & (c1 < SIZE), other=0.0)
                v1 = tl.load(at + v_column + d1, mask=real[:, None] & (d1 < SIZE), other=0.0)
                scores = tl.dot(q1, k1.T, scores)
            scores = tl.where(real[None, :], scores, -1e30)
            weights, decay, top, total = softmax_step(scores, top, total, scale)
            p = weights.to(dtype)
            acc0 = tl.dot(p, v0, acc0 * decay[:, None])
            if V1 > 0:
                acc1 = tl.dot(p, v1, acc1 * decay[:, None])
        share = 1.0 / total[:, None]
        tl.store(q_at + c0, (acc0 * share).to(dtype), mask=inside)
        if V1 > 0:
            tl.store(q_at + d1, (acc1 * share).to(dtype), mask=inside & (d1 < SIZE))


def attend_(qkv: Tensor, table: Tensor, queries: int) -> Tensor:
    """Attention of qkv [rows, 3, heads, head size], contiguous, 16-bit. Overwrites q.

    Returns a view of q as [rows, heads x head size]. Rows that no tile covers keep their q.
    `queries`: rows of each tile of the table. Head size: a multiple of 8 from 64 to 128.
    """
    rows, _, heads, size = qkv.shape
    d0, k1, v1 = columns(size)
    capability = torch.cuda.get_device_capability(qkv.device)
    keys, warps = tile(capability, queries, size)
    flat = qkv.view(rows, -1)

    def blocks(width: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(flat, [keys, max(width, 8)])

    attend_kernel[((len(table) - 1) * heads,)](
        flat,
        table,
        blocks(d0),
        blocks(k1),
        blocks(v1),
        size**-0.5 * LOG2_E,
        HEADS=heads,
        SIZE=size,
        D0=d0,
        K1=k1,
        V1=v1,
        BM=queries,
        BN=keys,
        TMA=capability >= (9, 0),
        num_warps=warps,
        num_stages=3,
    )
    return flat[:, : heads * size]


def tile(capability: tuple[int, int], queries: int, size: int) -> tuple[int, int]:
    """Rows of keys per step, and warps, that fit a chip's registers and shared memory.

    9.0 is tuned. 10.x keeps its sums in tensor memory. 8.x and 12.x keep all operands in registers.
    """
    major, _ = capability
    if major == 9:
        return KEYS, 4
    return KEYS // 2 if size > 96 and major != 10 else KEYS, queries // 16


def columns(size: int) -> tuple[int, int, int]:
    """D0, K1 and V1 of a head size. K1 and V1 are 0 if D0 is the whole head."""
    if size in (64, 128):
        return size, 0, 0
    if size % 8 or not 64 < size < 128:
        raise ValueError(f"head size {size}: this kernel takes multiples of 8 from 64 to 128")
    rest = triton.next_power_of_2(size - 64)
    return 64, max(rest, 16), rest
