"""The fast form of the block, for CUDA in 16 bits: Triton for norms and rotary, tuned GEMMs.

Equal to ReferenceBlocks within the rounding of the dtype, and safe to capture. Two ideas:
- The biases of proj and down are constants, so they are left out of the residual stream. Then the
  residual additions happen in the epilogues of the GEMMs, and each norm adds the biases of all
  layers so far.
- GELU happens in the epilogue of the up GEMM, which needs an MLP width that is a multiple of 128.
  So the width is padded with zeros, which every activation keeps. Without padding, GEMMs of odd
  widths, such as Qwen2.5-VL's 3420, are slow.

Rows for GEMMs in FP8 are quantised by a kernel that precedes them anyway: the norm, or the
activation, which is then not in the epilogue. No such kernel precedes proj, and a separate pass
would take as long as its GEMM gains, so proj stays in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.kernels.attention import Attention, Values
from actors.kernels.attention_fp8 import rotate_given
from actors.kernels.break_points import between
from actors.kernels.gemm.cublaslt import Epilogue
from actors.kernels.gemm.fp8 import Matrix
from actors.kernels.gemm.gemm import Gemm
from actors.kernels.triton.elementwise import (
    norm,
    quantised,
    quantised_norm,
    shifted,
    swiglu,
)
from actors.models.layers.block import (
    ACTIVATIONS,
    Affine,
    Attend,
    BlockWeights,
    Style,
    of_each,
    qk_normed,
    windows_of,
)
from actors.options import BlockForm

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

    form: BlockForm = "fast"

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
        gelu = style.activation == "gelu_tanh"
        self.layers, self.shifts = fold(weights)
        inner = weights[0].down.weight.shape[1]
        padding, gates = -inner % MLP_MULTIPLE, len(weights[0].up.weight) // inner
        up, down = [layer.up for layer in weights], [layer.down for layer in weights]
        if padding:  # with no padding F.pad would still copy
            up = [padded(layer, padding, gates) for layer in up]
            down = [replace(one, weight=F.pad(one.weight, (0, padding))) for one in down]
        self.qkv = gemm([layer.qkv for layer in weights], "bias")
        self.proj = Gemm([layer.proj.weight for layer in weights], None, "add")
        self.up = gemm(up, "bias")
        self.up_gelu = Gemm(self.up.weights, self.up.biases, "gelu_tanh") if gelu else None
        clamped: Callable[[Tensor], Tensor] = partial(swiglu, clamped=True)
        self.activate = (ACTIVATIONS | {"swiglu": swiglu, "swiglu_10": clamped})[style.activation]
        self.down = gemm(down, "add")

    def __call__(
        self, x: Tensor, cos: Tensor | None, sin: Tensor | None, values: Values
    ) -> tuple[Tensor, list[Tensor]]:
        tapped = []
        windows = windows_of(values)
        for index, layer in enumerate(between(self.layers)):
            seen = windows if index in self.style.windowed else values
            self.attend(index, layer, x, cos, sin, seen)
            self.mlp(index, layer, x)
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
        fp8 = self.qkv.fp8(index, len(x))
        qkv = self.qkv(index, self.norm(x, layer.shift1, layer.norm1, fp8))
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

    def mlp(self, index: int, layer: FastLayer, x: Tensor) -> None:
        fp8 = self.up.fp8(index, len(x)), self.down.fp8(index, len(x))
        y = self.norm(x, layer.shift2, layer.norm2, fp8[0])
        if self.up_gelu and not any(fp8):
            self.down(index, self.up_gelu(index, y), x)
            return
        y = self.up(index, y)
        self.down(index, quantised(y, self.style.activation) if fp8[1] else self.activate(y), x)

    def norm(self, x: Tensor, shift: Tensor, by: Affine, fp8: bool) -> Matrix:
        centred = self.style.norm == "layer"
        kernel = quantised_norm if fp8 else norm
        return kernel(x, shift, by.weight, by.bias, self.style.epsilon, centred=centred)


def gemm(layers: Sequence[Affine], epilogue: Epilogue) -> Gemm:
    biases = None if epilogue == "add" else [layer.bias for layer in layers]
    fp8 = [quantised(layer.weight) if layer.fp8 else None for layer in layers]
    return Gemm([layer.weight for layer in layers], biases, epilogue, fp8)


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
