"""Matrices in FP8 (e4m3), and what a GEMM of two of them computes.

Scales of a GEMM's inputs are constants, because the norm and the weights in front of a layer bound
its inputs. So the kernel that computes inputs also quantises them, even if that is a GEMM. That a
bound is far above the usual values costs little, because e4m3 has three bits of mantissa over a
range of 28,000. Rows that leave the service in FP8 have a scale each instead, because nothing
bounds them.
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
"""Rounding to e4m3 makes a number that is not subnormal larger by at most a factor of 17 / 16, and
so a product of two by less than this. What `compensated` adds to weights is left out; a value
that exceeds its bound becomes 448."""
FEWEST_ROWS = 1024
"""GEMMs with fewer rows run in 16 bits. On an H200, FP8 was 15 % slower with 400 rows and faster
with 2304, when rows had a scale each."""
FIRST_COLUMNS = 16
"""The fewest columns that `compensated` rounds together."""
DAMPING = 1e-3
"""Keeps `compensated` from changing the last columns much, whose means are small."""
BLOCK_ROWS = 8
"""How many rows the CPU quantises at a time, so that temporary tensors fit its caches."""
CAPABILITY = (8, 9)
"""The first compute capability with FP8 tensor cores."""


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """Inputs of a GEMM."""

    values: Tensor
    """float8_e4m3fn [rows, columns]."""
    scales: Tensor
    """float32 [1] or [columns]: values were multiplied by this, then rounded."""

    def __len__(self) -> int:
        return len(self.values)

    def view(self, rows: int, columns: int) -> Fp8Matrix:
        assert len(self.scales) == 1, "This is a bug."
        return Fp8Matrix(self.values.view(rows, columns), self.scales)


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """The weight of a linear layer whose inputs are in FP8."""

    values: Tensor
    """float8_e4m3fn [n, k]: the weight divided by the scales of the inputs and by `factor`."""
    factor: float
    scales: Tensor
    """Of the inputs; see Fp8Matrix."""

    @classmethod
    def of(cls, weight: Tensor, largest: Tensor, mean: Tensor | None = None) -> Fp8Weight:
        """For `largest` and `mean`, see `linear`."""
        scales = scales_for(largest)
        values, factor = rounded_weight(weight, scales, mean)
        return cls(values, float(factor), scales)


Matrix = Tensor | Fp8Matrix
Weight = Tensor | Fp8Weight


def values(matrix: Matrix | Weight) -> Tensor:
    return matrix if isinstance(matrix, Tensor) else matrix.values


def scales_for(largest: Tensor) -> Tensor:
    """The scales for values up to `largest`, a scalar or one number per column."""
    return (LARGEST / largest.float().clamp(min=TINY)).view(-1)


def rounded(x: Tensor, scales: Tensor) -> Fp8Matrix:
    """x in FP8, in plain torch. What exceeds the bound, infinity too, becomes 448."""
    scaled = (x.float() * scales).clamp(-LARGEST, LARGEST)
    return Fp8Matrix(scaled.to(torch.float8_e4m3fn), scales)


def rounded_weight(
    weight: Tensor, scales: Tensor, mean: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The values of an Fp8Weight, and its factor as a scalar."""
    exact = weight.float() / scales
    factor = exact.abs().amax().clamp(min=TINY) / LARGEST
    exact = exact / factor
    if mean is not None:
        exact = compensated(exact, mean * scales)
    return exact.to(torch.float8_e4m3fn), factor


def compensated(exact: Tensor, mean: Tensor) -> Tensor:
    """`exact` [n, k], rounded to e4m3 such that its product with `mean` [k] changes less.

    Columns are rounded in groups, those with the largest means first. What the product lacks after
    a group is added to the remaining columns, in proportion to their means. This is GPTQ (arXiv
    2210.17323) for a Hessian of rank one.
    """
    order = mean.abs().argsort(descending=True, stable=True)
    squares = mean[order].square()
    damping = (DAMPING * squares.sum()).clamp(min=TINY)
    made, missing, first = torch.empty_like(exact), exact.new_zeros(len(exact)), 0
    while first < len(order):
        last = first + max(FIRST_COLUMNS, first // 4)
        group = order[first:last]
        share = mean[group] / (squares[first:].sum() + damping)
        changed = (exact[:, group] + missing[:, None] * share).clamp(-LARGEST, LARGEST)
        made[:, group] = changed.to(torch.float8_e4m3fn).float()
        missing = missing + (exact[:, group] - made[:, group]) @ mean[group]
        first = last
    return made


def linear(
    x: Tensor, weight: Tensor, bias: Tensor, largest: Tensor, mean: Tensor | None = None
) -> Tensor:
    """The reference of a linear layer in FP8, on any device: multiplies quantised values in
    float32. `largest`: the bound of x, a scalar or one number per column. `mean` [columns]: that of
    x. The weight is rounded such that its product with it changes less."""
    scales = scales_for(largest)
    values, factor = rounded_weight(weight, scales, mean)
    made = F.linear(rounded(x, scales).values.float() * factor, values.float(), bias.float())
    return made.to(x.dtype)


def largest_normed(gain: Tensor, shift: Tensor) -> Tensor:
    """The largest value that a norm can give, as a scalar. No value of a row of n normed values is
    larger than the square root of n."""
    return (math.sqrt(len(gain)) * gain.float().abs() + shift.float().abs()).amax()


def largest_outputs(gain: Tensor, shift: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The largest value of each output of a linear layer in FP8 that follows a norm, float32 [n].
    The norm may be over a part of a row, as that of a patch is when several are merged.

    By the Cauchy-Schwarz inequality: the length of a normed row is at most the square root of its
    size.
    """
    weight, parts = weight.float(), weight.shape[1] // len(gain)
    gain, shift = gain.float().repeat(parts), shift.float().repeat(parts)
    lengths = (weight * gain).norm(dim=1) * math.sqrt(weight.shape[1])
    rounding = (ROUNDING - 1) * (weight.abs() @ shift.abs())
    largest: Tensor = ROUNDING * lengths + rounding + (weight @ shift + bias.float()).abs()
    return largest


def scaled_mm(x: Fp8Matrix, weight: Fp8Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """torch's GEMM for CUDA: x [rows, k] times weight [n, k] transposed."""
    one = torch.ones(1, device=x.values.device)
    return torch._scaled_mm(
        x.values,
        weight.values.t(),
        scale_a=one * weight.factor,
        scale_b=one,
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
    """Quantises each row of x [rows, columns] by itself.

    A row's largest value becomes 448. A row with an infinite value or a NaN becomes NaN.
    """
    if x.device.type == "cpu" and len(x) > BLOCK_ROWS:
        return Fp8Rows.cat([quantised(part) for part in x.split(BLOCK_ROWS)])
    scales = x.abs().amax(-1).float().clamp(min=TINY) / LARGEST
    return Fp8Rows((x / scales[:, None]).to(torch.float8_e4m3fn), scales)
