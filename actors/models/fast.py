"""The shared block on CUDA in 16 bits: Triton for norms, rotary and attention, cuBLAS for the rest.

Equal to ReferenceBlocks within the rounding of the dtype. Safe to capture. Two ideas carry it:
the biases of proj and down are constants, so the residual stream never holds them and its adds
ride in the matrix products (each norm adds the sum so far); and GELU rides in cuBLASLt's epilogue,
which wants the MLP's width in multiples of 128.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.attention import Attention, Values
from actors.kernels.layernorm import layer_norm
from actors.kernels.rotary import rotate_
from actors.models.block import ACTIVATIONS, Affine, BlockWeights, Style, qk_normed

MLP_MULTIPLE = 128


@dataclass(frozen=True, slots=True)
class FastLayer:
    """One layer, its biases moved to where they are free."""

    shift1: Tensor
    """float32 [width]: what the stream lacks before norm1."""
    norm1: Affine
    qkv: Affine
    qk_norm: Tensor | None
    proj: Tensor
    shift2: Tensor
    norm2: Affine
    up: Affine
    down: Tensor


class FastBlocks:
    """See Blocks. Writes over the x it is given; `attention` may write over its qkv."""

    def __init__(
        self,
        weights: Sequence[BlockWeights],
        style: Style,
        attention: Attention,
        taps: Sequence[int] = (),
    ) -> None:
        self.style = style
        self.attention = attention
        self.taps = taps
        self.layers, self.shifts = fold(weights)

    def __call__(
        self, x: Tensor, cos: Tensor | None, sin: Tensor | None, values: Values
    ) -> tuple[Tensor, list[Tensor]]:
        """See Blocks."""
        epsilon = self.style.epsilon
        tapped = []
        for index, layer in enumerate(self.layers):
            y = layer_norm(x, layer.shift1, layer.norm1.weight, layer.norm1.bias, epsilon)
            qkv = F.linear(y, layer.qkv.weight, layer.qkv.bias)
            qkv = qkv.view(len(x), 3, self.style.heads, -1)
            if layer.qk_norm is not None:
                qkv[:, :2] = qk_normed(qkv[:, :2], layer.qk_norm, epsilon)
            if cos is not None and sin is not None:
                rotate_(qkv, cos, sin)
            x.addmm_(self.attention(qkv, values), layer.proj.t())
            y = layer_norm(x, layer.shift2, layer.norm2.weight, layer.norm2.bias, epsilon)
            x.addmm_(self.up(y, layer.up), layer.down.t())
            if index in self.taps:
                tapped.append(x + self.shifts[index])
        return x.add_(self.shifts[-1]), tapped

    def up(self, y: Tensor, up: Affine) -> Tensor:
        """The MLP's first product and its activation."""
        if self.style.activation == "gelu_tanh":
            return torch._addmm_activation(up.bias, y, up.weight.t(), use_gelu=True)
        return ACTIVATIONS[self.style.activation](F.linear(y, up.weight, up.bias))


def fold(weights: Sequence[BlockWeights]) -> tuple[list[FastLayer], list[Tensor]]:
    """The layers, and what the stream lacks after each of them, in the weights' dtype."""
    shift = torch.zeros_like(weights[0].proj.bias, dtype=torch.float32)
    layers, after = [], []
    for layer in weights:
        middle = shift + layer.proj.bias.float()
        padding = -len(layer.up.weight) % MLP_MULTIPLE
        layers.append(
            FastLayer(
                shift1=shift,
                norm1=layer.norm1,
                qkv=layer.qkv,
                qk_norm=layer.qk_norm,
                proj=layer.proj.weight,
                shift2=middle,
                norm2=layer.norm2,
                up=Affine(
                    F.pad(layer.up.weight, (0, 0, 0, padding)), F.pad(layer.up.bias, (0, padding))
                ),
                down=F.pad(layer.down.weight, (0, padding)),
            )
        )
        shift = middle + layer.down.bias.float()
        after.append(shift.to(layer.down.bias.dtype))
    return layers, after
