"""SAM's image encoder: attention in windows, and in some layers over all of the view.

Computes what transformers.models.sam computes in SamVisionEncoder, with the decomposed relative
positions inside the GEMM of queries and keys: no bias of patches x patches is ever written. Takes
any number of views of one size; whatever depends on that size is computed beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.models.layers.block import Affine, BlockWeights, layer_norm

Place = Callable[[Tensor], Tensor]  # moves a table to the tower's device and dtype

EPSILON = 1e-6
SHRINKING = 4  # rows of patches per row of features: two convolutions with stride 2
ALIGNMENT = 8  # head sizes that attention kernels take are multiples of this


@dataclass(frozen=True, slots=True)
class Relative:
    """Relative positions of one layer, for squares of one size."""

    rows: Tensor  # [side, side, head size]: by the query's row and the key's
    columns: Tensor  # [side, side, head size]
    keys: Tensor  # [side ** 2, 2 x side + padding]: each key's row and column, one-hot


@dataclass(frozen=True, slots=True)
class SamLayer:
    weights: BlockWeights
    window: int  # the side of a window; 0: the whole view


def forward(x: Tensor, layer: SamLayer, relative: Relative, heads: int) -> Tensor:
    """One layer over [views, rows, columns, width]."""
    weights, window = layer.weights, layer.window
    y = layer_norm(x, weights.norm1, EPSILON)
    y = attend(windows(y, window) if window else y, weights, relative, heads)
    x = x + (joined(y, x.shape[1]) if window else y)
    y = F.gelu(weights.up.linear(layer_norm(x, weights.norm2, EPSILON)))
    return x + weights.down.linear(y)


def attend(x: Tensor, layer: BlockWeights, relative: Relative, heads: int) -> Tensor:
    """Attention within each square of [squares, side, side, width].

    The keys' one-hot rows and columns add the relative positions to the scores:
    softmax(scale x q.k + rows[q, k] + columns[q, k]) from one GEMM.
    """
    squares, side, _, width = x.shape
    qkv = layer.qkv.linear(x).view(squares, side * side, 3, heads, -1)
    query, key, value = qkv.permute(2, 0, 3, 1, 4)
    at = query.unflatten(2, (side, side))
    to_rows = torch.einsum("bnhwc,hkc->bnhwk", at, relative.rows).flatten(2, 3)
    to_columns = torch.einsum("bnhwc,wkc->bnhwk", at, relative.columns).flatten(2, 3)
    padding = relative.keys.shape[1] - 2 * side
    query = torch.cat([query * query.shape[-1] ** -0.5, to_rows, to_columns], -1)
    key = torch.cat([key, relative.keys.expand(squares, heads, -1, -1)], -1)
    out = F.scaled_dot_product_attention(F.pad(query, (0, padding)), key, value, scale=1.0)
    return layer.proj.linear(out.transpose(1, 2).reshape(squares, side, side, width))


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


def relative_positions(rows: Tensor, columns: Tensor, side: int, place: Place) -> Relative:
    """For squares with this side, from tables [2 x trained side - 1, head size]."""
    ones = torch.eye(side)
    keys = torch.cat([ones.repeat_interleave(side, 0), ones.repeat(side, 1)], 1)
    padding = -(keys.shape[1] + rows.shape[1]) % ALIGNMENT
    return Relative(
        rows=place(distances(rows, side)),
        columns=place(distances(columns, side)),
        keys=place(F.pad(keys, (0, padding))),
    )


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
