"""The fast form of the block, for CUDA in 16 bits: Triton for norms and rotary, tuned GEMMs.

Equal to ReferenceBlocks within the rounding of the dtype, and safe to capture. Two ideas:
- The biases of proj and down are constants, so they are left out of the residual stream. Then the
  residual additions happen in the epilogues of the GEMMs, and each norm adds the biases of all
  layers so far.
- GELU happens in the epilogue of the up GEMM, which needs an MLP width that is a multiple of 128.
  So the width is padded with zeros, which every activation keeps. Without padding, GEMMs of odd
  widths, such as Qwen2.5-VL's 3420, are slow. The epilogue has only GELU's tanh form. In bfloat16
  it replaces the exact one, too: the two differ by at most 5e-4, which does not raise the error of
  an MLP's output.

The inputs of GEMMs in FP8 are quantised by the kernel that computes them anyway: the norm, the up
GEMM with its GELU, or that of another activation. The attention kernels do not quantise, so proj
stays in 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.kernels.attention import Attention, Values
from actors.kernels.attention_fp8 import rotate_given
from actors.kernels.break_points import between
from actors.kernels.gemm.cublaslt import Epilogue
from actors.kernels.gemm.fp8 import Fp8Weight, Matrix
from actors.kernels.gemm.gemm import Gemm
from actors.kernels.triton.elementwise import activated, norm, shifted
from actors.models.layers.block import (
    Activation,
    Affine,
    Attend,
    BlockWeights,
    Style,
    bounded_block,
    of_each,
    qk_normed,
    windows_of,
)

MLP_MULTIPLE = 128


@dataclass(frozen=True, slots=True)
class FastLayer:
    """What a layer has besides its GEMMs."""

    shift1: Tensor
    """float32 [width]: the biases that the residual stream lacks before norm1. `shift2`: those
    before norm2."""
    norm1: Affine
    qk_norm: Tensor | None
    shift2: Tensor
    norm2: Affine
    attention_fp8: bool


class FastBlocks:
    """See Blocks. Overwrites x."""

    def __init__(
        self,
        weights: Sequence[BlockWeights],
        style: Style,
        attention: Attend | Sequence[Attend],
        taps: Sequence[int] = (),
    ) -> None:
        assert style.fast, "ModelSpec.fast_blocks says that there is none. This is a bug."
        self.style = style
        self.attention = of_each(attention, len(weights))
        self.taps = taps
        weights = [bounded_block(layer) for layer in weights]
        self.layers, self.shifts = fold(weights)
        self.qkv = gemm([layer.qkv for layer in weights], "bias")
        self.proj = Gemm([layer.proj.weight for layer in weights], None, "add")
        up, down = [layer.up for layer in weights], [layer.down for layer in weights]
        self.mlp = Mlp(up, down, style.activation, "add")

    def __call__(
        self, x: Tensor, cos: Tensor | None, sin: Tensor | None, values: Values
    ) -> tuple[Tensor, list[Tensor]]:
        tapped = []
        windows = windows_of(values)
        for index, layer in enumerate(between(self.layers)):
            seen = windows if index in self.style.windowed else values
            self.attend(index, layer, x, cos, sin, seen)
            scales = self.mlp.scales(index, len(x))
            self.mlp(index, self.norm(x, layer.shift2, layer.norm2, scales), len(x), x)
            if index in self.taps:
                tapped.append(shifted(x, self.shifts[index], torch.empty_like(x)))
        return shifted(x, self.shifts[-1], x), tapped

    def attend(
        self,
        index: int,
        layer: FastLayer,
        x: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        seen: Values,
    ) -> None:
        """Adds attention to x. A method, so that its intermediate tensors are freed before the
        MLP runs."""
        scales = self.qkv.scales(index, len(x))
        qkv = self.qkv(index, self.norm(x, layer.shift1, layer.norm1, scales))
        qkv = qkv.view(len(x), 3, self.style.heads, -1)
        if layer.qk_norm is not None:
            qkv[:, :2] = qk_normed(qkv[:, :2], layer.qk_norm, self.style.epsilon)
        attention = self.attention[index]
        if layer.attention_fp8:
            attended = cast("Attention", attention).fp8(qkv, seen, cos, sin)
        else:
            rotate_given(qkv, cos, sin)
            attended = attention(qkv, seen)
        self.proj(index, attended, x)

    def norm(self, x: Tensor, shift: Tensor, by: Affine, scales: Tensor | None) -> Matrix:
        given, centred = (x, shift, by.weight, by.bias), self.style.norm == "layer"
        return norm(*given, self.style.epsilon, centred=centred, scales=scales)


class Mlp:
    """The MLP of every block, or of a merger."""

    def __init__(
        self,
        up: Sequence[Affine],
        down: Sequence[Affine],
        activation: Activation,
        epilogue: Epilogue,
    ) -> None:
        """`epilogue`: of the down GEMM."""
        inner = down[0].weight.shape[1]
        padding, gates = -inner % MLP_MULTIPLE, len(up[0].weight) // inner
        if padding:  # with no padding F.pad would still copy
            up = [padded(layer, padding, gates) for layer in up]
            down = [padded_inputs(layer, padding) for layer in down]
        self.activation = activation
        self.up, self.down = gemm(up, "bias"), gemm(down, epilogue)
        exact = activation == "gelu" and up[0].weight.dtype != torch.bfloat16
        gelu = activation in ("gelu", "gelu_tanh") and not exact
        self.up_gelu = gemm(up, "gelu_tanh", self.up.fp8) if gelu else None

    def scales(self, layer: int, rows: int) -> Tensor | None:
        """The scales of x, if that should be in FP8."""
        return self.up.scales(layer, rows)

    def __call__(self, layer: int, x: Matrix, rows: int, out: Tensor | None) -> Tensor:
        """See Gemm. `rows`: those that decide whether FP8 is used."""
        scales = self.down.scales(layer, rows)
        if self.up_gelu is None or (scales is not None and isinstance(x, Tensor)):
            # No GEMM with inputs in 16 bits has results in FP8.
            made = activated(self.up(layer, x), self.activation, scales)
        elif scales is None or isinstance(x, Tensor):
            made = self.up_gelu(layer, x)
        else:
            made = self.up_gelu.to_fp8(layer, x, scales)
        return self.down(layer, made, out)


def gemm(
    layers: Sequence[Affine], epilogue: Epilogue, fp8: Sequence[Fp8Weight | None] = ()
) -> Gemm:
    """`fp8`: the weights in FP8, if there is a Gemm that has them already."""
    biases = None if epilogue == "add" else [layer.bias for layer in layers]
    fp8 = fp8 or [in_fp8(layer) if layer.fp8 else None for layer in layers]
    return Gemm([layer.weight for layer in layers], biases, epilogue, fp8)


def in_fp8(layer: Affine) -> Fp8Weight:
    assert layer.input_bound is not None, "This is a bug."
    return Fp8Weight.of(layer.weight, layer.input_bound, layer.input_mean)


def padded_inputs(linear: Affine, columns: int) -> Affine:
    """Appends columns of zeros to the weight, for inputs that are zero."""
    bound, mean = linear.input_bound, linear.input_mean
    if bound is not None and bound.dim():
        bound = F.pad(bound, (0, columns))
    if mean is not None:
        mean = F.pad(mean, (0, columns))
    weight = F.pad(linear.weight, (0, columns))
    return replace(linear, weight=weight, input_bound=bound, input_mean=mean)


def padded(linear: Affine, rows: int, parts: int) -> Affine:
    """Appends `rows` rows of zeros to each of the layer's `parts`."""
    weight, bias = (each.unflatten(0, (parts, -1)) for each in (linear.weight, linear.bias))
    weight, bias = F.pad(weight, (0, 0, 0, rows)), F.pad(bias, (0, rows))
    return replace(linear, weight=weight.flatten(0, 1), bias=bias.flatten())


def fold(weights: Sequence[BlockWeights]) -> tuple[list[FastLayer], list[Tensor]]:
    """The layers, and the biases that the residual stream lacks after each: float32 [width]."""
    shift = torch.zeros_like(weights[0].proj.bias, dtype=torch.float32)
    layers, after = [], []
    for layer in weights:
        middle = shift + layer.proj.bias.float()
        layers.append(
            FastLayer(shift, layer.norm1, layer.qk_norm, middle, layer.norm2, layer.attention_fp8)
        )
        shift = middle + layer.down.bias.float()
        after.append(shift)
    return layers, after
