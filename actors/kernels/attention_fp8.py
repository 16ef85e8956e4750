"""The numbers of attention in FP8, and what it computes, in plain torch on any device.

Queries, keys and values are e4m3, with fixed scales: e4m3 has exponents, so only values far beyond
those of trained towers would need others, and `calibrate` sees what does not fit. A score counts
in steps of e4m3: 63 times a score, rounded, is the code of the softmax weight. Codes count eighths
of an octave, so between two powers of two the exponential is a straight line. That adds up to 3 %
to the up to 6 % by which e4m3 rounds a weight, and the kernel (hopper/attention_fp8.cu) needs no
exponentials, which limit it in 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from actors.kernels import Shapes, Values
from actors.kernels.gemm.fp8 import LARGEST

CAPABILITY = (9, 0)
FEWEST_KEYS = {64: 15376, 72: 8160, 80: 8160}
"""By head size. Shorter segments stay in 16 bits: with what quantising takes, FP8 was not faster at
the next shorter length of BENCHMARKS.md, or not measured."""
STEPS = 63
"""Codes of e4m3 in a score of 1."""
OCTAVE = 0.126953125
"""8 / STEPS, as a sum of two numbers of e4m3: 1/8 + 1/512."""
MOST = 2 - OCTAVE
"""References are chosen so that the largest score of a row is at most this; 2 is code 126, 448."""
VALUE_SCALE = 4.0
ROWS = 1024
"""Queries that are computed at a time, which bounds the memory for scores."""


class LongAttention(Protocol):
    """The attention of long segments, in FP8, as a part of an Attention, which see."""

    fewest: int
    """Of patches in a long segment."""

    def inputs(self, patches: int) -> Shapes:
        """Empty for budgets that no long segment fits."""

    def metadata(self, lengths: Sequence[int], patches: int) -> dict[str, Tensor]: ...

    def __call__(self, qkv: Tensor, values: Values, cos: Tensor | None, sin: Tensor | None) -> None:
        """Writes over q of the long segments, and rotates q and k of the others."""


def query_scale(head_size: int) -> float:
    """What queries and keys are multiplied by, so that their products are scores."""
    return math.sqrt(OCTAVE * math.log2(math.e) / math.sqrt(head_size))


def rounded(x: Tensor, scale: float) -> Tensor:
    """In e4m3 after scaling, as float32."""
    return (x.float() * scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float()


def has(qkv: Tensor) -> bool:
    """Whether there is attention in FP8 for heads of this size, and for this GPU; on the CPU it is
    emulated."""
    ours = not qkv.is_cuda or torch.cuda.get_device_capability(qkv.device) == CAPABILITY
    return ours and qkv.shape[3] in FEWEST_KEYS


def attended(qkv: Tensor, lengths: Sequence[int], out: Tensor) -> None:
    """Writes the attention of long segments, in FP8, over the rows of out [patches, heads x head
    size]. qkv [patches, 3, heads, head size], rotated.

    The kernel's sums have fewer bits, and it finds each row's reference while it goes on.
    """
    scale, start = query_scale(qkv.shape[3]), 0
    for length in lengths:
        if length >= FEWEST_KEYS[qkv.shape[3]]:
            for head in range(qkv.shape[2]):
                query, key, value = qkv[start : start + length, :, head].unbind(1)
                made = one_head(rounded(query, scale), rounded(key, scale), value)
                columns = slice(head * qkv.shape[3], (head + 1) * qkv.shape[3])
                out[start : start + length, columns] = made
        start += length


def one_head(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    value = rounded(value, VALUE_SCALE)
    made = []
    for rows in query.split(ROWS):
        score = rows @ key.t()
        above = torch.ceil((score.amax(1, keepdim=True) - MOST) / OCTAVE)
        weight = weights(score - above * OCTAVE)
        made.append(weight @ value / (weight.sum(1, keepdim=True) * VALUE_SCALE))
    return torch.cat(made)


def weights(score: Tensor) -> Tensor:
    """Of scores below 2, as float32."""
    code = (score.relu().half().float() * STEPS).round()
    return code.nan_to_num(127).byte().view(torch.float8_e4m3fn).float()


def rotate_given(qkv: Tensor, cos: Tensor | None, sin: Tensor | None) -> None:
    """In place, unless cos is None; CUDA only."""
    if cos is None or sin is None:
        return
    from actors.kernels.triton.elementwise import rotate_  # needs Triton

    rotate_(qkv, cos, sin)
