"""What is particular to SAM's image encoder: its attention, and the neck after its blocks.

Computes what transformers.models.sam computes in SamVisionEncoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.kernels import LOG2_E
from actors.kernels.attention import Values
from actors.kernels.hopper.attention import VIEW_RINGS, attend_views_, kernels_for
from actors.models.layers.block import Affine, BlockWeights, layer_norm

EPSILON = 1e-6
SHRINKING = 4  # rows of patches per row of features: two convolutions with stride 2


@dataclass(frozen=True, slots=True)
class SquareAttention:
    """Attention of one layer within windows of each view, in plain torch.

    With relative positions, decomposed: softmax(scale x q.k + rows[q, k] + columns[q, k]) v.
    Windows that reach beyond the view see zeros there, which take part as keys.
    """

    side: int
    """Patches per side of a view."""
    tables: Tensor
    """[2, window, window, head size]: for the rows of query and key, and for their columns."""

    def __call__(self, qkv: Tensor, values: Values) -> Tensor:
        """[views x side ** 2, 3, heads, head size] to [views x side ** 2, heads x head size]."""
        _, _, heads, size = qkv.shape
        side, window = self.side, self.tables.shape[1]
        squares = windows(qkv.reshape(-1, side, side, 3 * heads * size), window)
        squares = squares.reshape(-1, window**2, 3, heads, size)
        query, key, value = squares.permute(2, 0, 3, 1, 4)
        at = query.unflatten(2, (window, window))
        to_rows = torch.einsum("bnhwc,hkc->bnhwk", at, self.tables[0])[..., None]
        to_columns = torch.einsum("bnhwc,wkc->bnhwk", at, self.tables[1])[..., None, :]
        bias = (to_rows + to_columns).flatten(4, 5).flatten(2, 3)
        out = F.scaled_dot_product_attention(query, key, value, bias)
        out = out.transpose(1, 2).reshape(-1, window, window, heads * size)
        return joined(out, side).flatten(0, 2)


class FastSquareAttention(SquareAttention):
    """The same with our kernels: CUDA, 16 bits, head sizes that are powers of two."""

    def __call__(self, qkv: Tensor, values: Values) -> Tensor:
        """Overwrites qkv. The result is a view of it."""
        from actors.kernels.triton import square_attention

        size, side = qkv.shape[-1], self.side
        whole = size == 64 and side in VIEW_RINGS and self.tables.shape[1] == side
        kernels = kernels_for(qkv.device, qkv.dtype, size, side) if whole else None
        if not kernels:
            return square_attention.attend_squares_(qkv, self.tables, side)
        terms = square_attention.position_terms(qkv, self.tables, side, unit=1 / LOG2_E)
        return attend_views_(qkv, terms, side, *kernels)


def without_key_bias(layer: BlockWeights) -> BlockWeights:
    """The same layer, but k and v have no bias.

    SAM pads windows with zeros before qkv, so k and v of the padding are their biases. Without
    biases, they are zero. The bias of k adds the same to all scores of a query, which does not
    change the softmax. The bias of v is added to the result, so it moves into the bias of proj.
    """
    query, key, value = layer.qkv.bias.chunk(3)
    proj = F.linear(value.float(), layer.proj.weight.float(), layer.proj.bias.float())
    bias = torch.cat([query, torch.zeros_like(key), torch.zeros_like(value)])
    return replace(
        layer,
        qkv=replace(layer.qkv, bias=bias),
        proj=replace(layer.proj, bias=proj.to(value.dtype)),
    )


def windows(x: Tensor, window: int) -> Tensor:
    """[views, side, side, width] to [views x windows, window, window, width], padded with zeros."""
    rest = -x.shape[1] % window
    x = F.pad(x, (0, 0, 0, rest, 0, rest))
    parts: Tensor = x.unflatten(2, (-1, window)).unflatten(1, (-1, window))
    return parts.transpose(2, 3).flatten(0, 2)


def joined(x: Tensor, side: int) -> Tensor:
    """The inverse of windows, without the padding."""
    count = -(-side // x.shape[1])
    parts: Tensor = x.unflatten(0, (-1, count, count)).transpose(2, 3)
    return parts.flatten(3, 4).flatten(1, 2)[:, :side, :side]


def distances(table: Tensor, side: int) -> Tensor:
    """[side, side, head size]: the table's row for every query and key, resampled if needed."""
    length, table = 2 * side - 1, table.float()
    if len(table) != length:
        table = F.interpolate(table.t()[None], size=length, mode="linear")[0].t()
    places = torch.arange(side)
    return table[places[:, None] - places + side - 1]


@dataclass(frozen=True, slots=True)
class Neck:
    """From the last layer to features with a quarter of the rows and columns."""

    narrow: Tensor  # [channels, width, 1, 1]
    norm1: Affine
    mix: Tensor  # [channels, channels, 3, 3]
    norm2: Affine
    halving: Sequence[Tensor]  # convolutions of 3 x 3 with stride 2

    def __call__(self, x: Tensor) -> Tensor:
        """[views, side, side, width] to [views, (side / 4) ** 2, channels]."""
        x = layer_norm(F.linear(x, self.narrow.flatten(1)), self.norm1, EPSILON)
        x = F.conv2d(x.permute(0, 3, 1, 2), self.mix, padding=1)
        x = layer_norm(x.permute(0, 2, 3, 1), self.norm2, EPSILON).permute(0, 3, 1, 2)
        for weight in self.halving:
            x = F.conv2d(x, weight, stride=2, padding=1)
        return x.flatten(2).transpose(1, 2)
