"""Matrices in FP8 (e4m3), and what a GEMM of two of them computes.

A GEMM's inputs have one scale each, which is known before they are computed: that of weights is
measured, that of activations follows from the norm and the weights in front of them. So the kernel
that computes activations also quantises them, even if that is a GEMM. e4m3 has three bits of
mantissa whatever the exponent, so a scale that is too large by a factor of 1,000 costs no
precision. Rows that leave the service in FP8 have a scale each instead, because nothing bounds
them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST = 448.0
"""The largest e4m3 number."""
TINY = 1e-12
"""A largest value counts as at least this, so that no scale is zero."""
ROUNDING = 1.15
"""Rounding to e4m3 makes a number larger by at most a factor of 17 / 16, and so a product of two by
less than this."""
FEWEST_ROWS = 1024
"""GEMMs with fewer rows are faster in 16 bits: on an H200, FP8 was 15 % slower with 400 rows and
faster with 2304."""
BLOCK_ROWS = 8
"""How many rows the CPU quantises at a time, so that temporary tensors fit its caches."""
CAPABILITY = (8, 9)
"""The first compute capability with FP8 tensor cores."""


@dataclass(frozen=True, slots=True)
class Fp8Scale:
    """Values are divided by `factor` and then rounded to e4m3."""

    factor: float
    reciprocal: Tensor
    """float32 [1]: 1 / factor, where kernels can read it."""

    @classmethod
    def of(cls, largest: Tensor) -> Fp8Scale:
        """The scale for values of up to `largest`."""
        factor = max(float(largest), TINY) / LARGEST
        return cls(factor, torch.full((1,), 1 / factor, device=largest.device))


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """A matrix for a GEMM: `values` times the scale's factor."""

    values: Tensor
    """float8_e4m3fn [rows, columns]."""
    scale: Fp8Scale

    def __len__(self) -> int:
        return len(self.values)

    def float(self) -> Tensor:
        return self.values.float() * self.scale.factor

    def view(self, rows: int, columns: int) -> Fp8Matrix:
        return Fp8Matrix(self.values.view(rows, columns), self.scale)

    @classmethod
    def rounded(cls, x: Tensor, scale: Fp8Scale) -> Fp8Matrix:
        """x in FP8, in plain torch."""
        values = (x.float() * scale.reciprocal).clamp(-LARGEST, LARGEST)
        return cls(values.to(torch.float8_e4m3fn), scale)

    @classmethod
    def weight(cls, weight: Tensor) -> Fp8Matrix:
        """A weight in FP8."""
        return cls.rounded(weight, Fp8Scale.of(weight.abs().amax()))


Matrix = Tensor | Fp8Matrix


def values(matrix: Matrix) -> Tensor:
    return matrix.values if isinstance(matrix, Fp8Matrix) else matrix


def linear(x: Tensor, weight: Tensor, bias: Tensor, largest: Tensor) -> Tensor:
    """The reference of a linear layer in FP8, on any device: multiplies quantised values in
    float32. `largest`: the bound of x."""
    inputs = Fp8Matrix.rounded(x, Fp8Scale.of(largest))
    made = F.linear(inputs.float(), Fp8Matrix.weight(weight).float(), bias.float())
    return made.to(x.dtype)


def largest_normed(gain: Tensor, shift: Tensor) -> Tensor:
    """The largest value that a norm can give, as a scalar. No value of a row of n normed values is
    larger than the square root of n."""
    return (math.sqrt(len(gain)) * gain.float().abs() + shift.float().abs()).amax()


def largest_outputs(gain: Tensor, shift: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The largest value of each output of a linear layer that follows a norm, float32 [n]. The norm
    may be over a part of a row, as that of a patch is when several are merged.

    By the Cauchy-Schwarz inequality: the length of a normed row is at most the square root of its
    size.
    """
    weight, parts = weight.float(), weight.shape[1] // len(gain)
    lengths = (weight * gain.float().repeat(parts)).norm(dim=1) * math.sqrt(weight.shape[1])
    shifts = (weight @ shift.float().repeat(parts)).abs()
    largest: Tensor = ROUNDING * (lengths + shifts) + bias.float().abs()
    return largest


def scaled_mm(x: Fp8Matrix, weight: Fp8Matrix, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """torch's GEMM for CUDA: x [rows, k] times weight [n, k] transposed."""
    return torch._scaled_mm(
        x.values,
        weight.values.t(),
        scale_a=x.scale.reciprocal.reciprocal(),
        scale_b=weight.scale.reciprocal.reciprocal(),
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=True,
    )


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Rows with a scale each: row i is `values[i]` times `scales[i]`."""

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


def quantised(x: Tensor) -> Fp8Rows:
    """Quantises each row of x [rows, columns] by itself, in plain torch. On CUDA,
    kernels/triton/elementwise.py is faster.

    A row's largest value becomes 448. A row with an infinite value becomes NaN. In this
    implementation, so does a row with a NaN.
    """
    if x.device.type == "cpu" and len(x) > BLOCK_ROWS:
        return Fp8Rows.cat([quantised(part) for part in x.split(BLOCK_ROWS)])
    scales = x.abs().amax(-1).float().clamp(min=TINY) / LARGEST
    return Fp8Rows((x / scales[:, None]).to(torch.float8_e4m3fn), scales)
