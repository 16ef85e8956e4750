"""Matrices in FP8 with a scale per row, and what a GEMM of two of them computes.

Rows of activations are tokens; rows of weights are output channels. e4m3 has three bits of
mantissa. A row's largest value becomes 448, and values up to 2 ** -10 times the scale become zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST = 448.0
"""The largest e4m3 number."""
TINY = 1e-12
"""A row's largest value counts as at least this, so that no scale is zero."""
FEWEST_ROWS = 1024
"""GEMMs with fewer rows are faster in 16 bits: on an H200, FP8 was 15 % slower with 400 rows and
faster with 2304."""
BLOCK_ROWS = 8
"""How many rows the CPU quantises at a time, so that temporary tensors fit its caches."""
CAPABILITY = (8, 9)
"""The first compute capability with FP8 tensor cores."""


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
    """Quantises x [rows, columns] in plain torch. On CUDA, kernels/triton/elementwise.py is faster.

    A row with an infinite value becomes NaN. In this implementation, so does a row with a NaN.
    """
    if x.device.type == "cpu" and len(x) > BLOCK_ROWS:
        return Fp8Rows.cat([quantised(part) for part in x.split(BLOCK_ROWS)])
    scales = x.abs().amax(-1).float().clamp(min=TINY) / LARGEST
    return Fp8Rows((x / scales[:, None]).to(torch.float8_e4m3fn), scales)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The reference of a linear layer in FP8, on any device: multiplies quantised values in
    float32."""
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
