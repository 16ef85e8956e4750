"""Matrices in FP8 with a scale for each row, and what a GEMM of two of them computes.

Rows of activations are tokens, rows of weights output channels. e4m3 has three bits of mantissa: a
row's largest value becomes 448, and what is below 2 ** -9 of its scale becomes zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST = 448.0
"""Of e4m3."""
TINY = 1e-12
"""Rows whose largest value is below this are zero."""
FEWEST_ROWS = 1024
"""Fewer rows are faster in 16 bits: on an H200 400 were 15 % slower in FP8, 2304 faster."""
BLOCK_ROWS = 8
"""What the CPU quantises at a time: its caches hold what that allocates."""
CAPABILITY = (8, 9)
"""The first with FP8 tensor cores."""


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """A matrix: row i is `values[i]` times `scales[i]`."""

    values: Tensor
    """float8_e4m3fn [rows, columns], contiguous."""
    scales: Tensor
    """float32 [rows]."""

    def __len__(self) -> int:
        return len(self.values)

    def float(self) -> Tensor:
        return self.values.float() * self.scales[:, None]

    @classmethod
    def cat(cls, parts: Sequence[Fp8Rows]) -> Fp8Rows:
        values = torch.cat([part.values.view(torch.uint8) for part in parts])
        return cls(values.view(torch.float8_e4m3fn), torch.cat([part.scales for part in parts]))


Matrix = Tensor | Fp8Rows


def values(matrix: Matrix) -> Tensor:
    return matrix.values if isinstance(matrix, Fp8Rows) else matrix


def quantised(x: Tensor) -> Fp8Rows:
    """x [rows, columns] in plain torch. On CUDA kernels/triton/elementwise.py is faster.

    A row with an infinite value becomes NaN, and here so does a row with a NaN.
    """
    if x.device.type == "cpu" and len(x) > BLOCK_ROWS:
        return Fp8Rows.cat([quantised(part) for part in x.split(BLOCK_ROWS)])
    scales = x.abs().amax(-1).float().clamp(min=TINY) / LARGEST
    return Fp8Rows((x / scales[:, None]).to(torch.float8_e4m3fn), scales)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """What a linear layer in FP8 gives, on any device: products of quantised values in float32."""
    made = F.linear(quantised(x).float(), quantised(weight).float(), bias.float())
    return made.to(x.dtype)


def scaled_mm(x: Fp8Rows, weight: Fp8Rows, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """torch's GEMM for CUDA: x [rows, k] times weight [n, k] transposed."""
    return torch._scaled_mm(
        x.values,
        weight.values.t(),
        scale_a=x.scales[:, None],
        scale_b=weight.scales[None, :],
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=True,
    )
