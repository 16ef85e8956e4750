"""Constants of attention in FP8, and its reference in plain torch for any device.

Queries, keys and values are e4m3 with fixed scales. e4m3 has exponents, so only values far beyond
those of trained towers would need other scales, and `calibrate` finds layers where they do not fit.
Scores are scaled so that 63 times a score, rounded, is the e4m3 code of its softmax weight. Eight
codes make an octave, so the exponential is a straight line between two powers of two. That adds up
to 3 % to the up to 6 % by which e4m3 rounds a weight. In return, the kernel
(hopper/attention_fp8.cu) needs no exponentials, which limit attention in 16 bits.
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
"""The shortest segments in FP8, by head size. Chosen on an H100 (docs/history/benchmarks.md), where
FP8 with quantising was not faster at the next shorter length."""
STEPS = 63
"""How many e4m3 codes a score of 1 is."""
OCTAVE = 0.126953125
"""The score of a factor of 2: 8 / STEPS, approximated by a sum of two e4m3 numbers, 1/8 + 1/512."""
MOST = 2 - OCTAVE
"""The reference of a row is chosen so that its largest score is at most this. A score of 2 is code
126, which is 448, the largest e4m3 number."""
VALUE_SCALE = 4.0
ROWS = 1024
"""Queries that are computed at a time, to bound the memory for scores."""


class LongAttention(Protocol):
    """The FP8 attention of long segments, a part of an Attention."""

    fewest: int
    """The fewest patches of a long segment."""

    def inputs(self, patches: int) -> Shapes:
        """The static inputs. Empty for budgets that are too small for a long segment."""

    def metadata(self, lengths: Sequence[int], patches: int) -> dict[str, Tensor]: ...

    def __call__(self, qkv: Tensor, values: Values, cos: Tensor | None, sin: Tensor | None) -> None:
        """Overwrites q of the long segments with the result, and rotates q and k of the others."""


def query_scale(head_size: int) -> float:
    """The factor for both queries and keys that makes their dot products scores."""
    return math.sqrt(OCTAVE * math.log2(math.e) / math.sqrt(head_size))


def rounded(x: Tensor, scale: float) -> Tensor:
    """x scaled and rounded to e4m3, as float32."""
    return (x.float() * scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float()


def has(qkv: Tensor) -> bool:
    """Whether there is FP8 attention for this head size and this device."""
    return runs_on(qkv.device) and qkv.shape[3] in FEWEST_KEYS


def runs_on(device: torch.device) -> bool:
    """Whether the device has FP8 attention. On the CPU it is emulated."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) == CAPABILITY


def attended(qkv: Tensor, lengths: Sequence[int], out: Tensor) -> None:
    """Computes the attention of long segments in FP8, into their rows of out [patches, heads x head
    size]. qkv [patches, 3, heads, head size], rotated.

    Unlike this, the kernel has sums of fewer bits and adjusts each row's reference as it goes.
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
    """The softmax weights of scores below 2, before normalisation, as float32."""
    code = (score.relu().half().float() * STEPS).round()
    return code.nan_to_num(127).byte().view(torch.float8_e4m3fn).float()


def rotate_given(qkv: Tensor, cos: Tensor | None, sin: Tensor | None) -> None:
    """Rotates q and k in place, unless cos is None. CUDA only."""
    if cos is None or sin is None:
        return
    from actors.kernels.triton.elementwise import rotate_  # needs Triton

    rotate_(qkv, cos, sin)
