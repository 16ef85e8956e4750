"""What precedes and follows the blocks: patch embedding, positions, and merging patches to tokens.

Patches are in merge-block order: the merge_size ** 2 patches of one token are adjacent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.kernels.attention import Shapes, Values
from actors.models.layers.block import NORMS, Affine, Norm, bounded, centred_inputs

if TYPE_CHECKING:
    from actors.models.layers.fast import Mlp

Rgb = tuple[float, float, float]

PositionTaps = Callable[[Tensor, int, int, int], tuple[Tensor, Tensor]]
"""Resamples a learned table of positions to a grid; see bilinear_taps."""

CUBIC = -0.75  # the parameter of the bicubic kernel, as in torch


def folded_embedding(weight: Tensor, bias: Tensor, mean: Rgb, std: Rgb) -> Affine:
    """The patch embedding for `uint8 - 128` instead of normalised float pixels, in float32.

    Every frame of weight [width, 3, frames, patch, patch] sees the same picture, so the frames are
    summed. Centred bytes are exact in bfloat16; uncentred bytes would lose bits in the GEMM.
    """
    means = torch.tensor(mean, dtype=torch.float64, device=weight.device)
    shift = 128 - means[:, None, None] * 255
    folded = scaled_to_bytes(weight.double().sum(2), std)
    return Affine(
        folded.flatten(1).float(), (bias.double() + (folded * shift).sum((1, 2, 3))).float()
    )


def scaled_to_bytes(weight: Tensor, std: Rgb) -> Tensor:
    """A patch embedding [width, 3, patch, patch] for bytes instead of pixels, in float64."""
    stds = torch.tensor(std, dtype=torch.float64, device=weight.device)
    return weight.double() / (stds[:, None, None] * 255)


def centred(patches: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 - 128, exact in any dtype with at least 8 bits of precision, in one pass."""
    return torch.sub(patches, 128.0, out=torch.empty_like(patches, dtype=dtype))


class Merger:
    """Merges merge_size ** 2 patches into one token: norm, linear, GELU, linear."""

    def __init__(
        self, norm: Affine, up: Affine, down: Affine, *, kind: Norm = "layer", epsilon: float = 1e-6
    ) -> None:
        """`norm`: over each patch, or over all patches of a token, depending on its size."""
        self.norm, up = centred_inputs(norm, up)
        self.kind = kind
        self.epsilon = epsilon
        self.linears = up, down = bounded(self.norm, up, down)
        self.mlp: Mlp | None = None
        if norm.weight.is_cuda and norm.weight.dtype != torch.float32:
            from actors.models.layers.fast import Mlp  # needs Triton, which comes with CUDA

            self.mlp = Mlp([up], [down], "gelu", "bias")
        self.nothing = torch.zeros_like(norm.weight, dtype=torch.float32)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[patches, width] to [tokens, out width]; transformers: Qwen3VLVisionPatchMerger.

        `out`: where to write the rows; may be some columns of a wider matrix.
        """
        up, down = self.linears
        columns = up.weight.shape[1]
        rows = x.reshape(-1, len(self.norm.weight))
        if self.mlp is None:
            y = NORMS[self.kind](rows, self.norm, self.epsilon).view(-1, columns)
            y = down.gemm(F.gelu(up.gemm(y)))
            return y if out is None else out.copy_(y)
        from actors.kernels.triton.elementwise import norm

        given = rows, self.nothing, self.norm.weight, self.norm.bias, self.epsilon
        centred, scales = self.kind == "layer", self.mlp.scales(0, len(x))
        made = norm(*given, centred=centred, scales=scales)
        return self.mlp(0, made.view(-1, columns), len(x), out)


@dataclass(frozen=True, slots=True)
class Positions:
    """Learned positions, resampled to each grid and added to the embedded patches."""

    table: Tensor  # [side x side, width]
    resample: PositionTaps
    taps: int  # entries of the table per position

    def inputs(self, patches: int) -> Shapes:
        return {
            "taps": ((patches, self.taps), torch.int32),
            "tap_weights": ((patches, self.taps), torch.float32),
        }

    def inputs_of(self, places: Tensor, rows: int, columns: int) -> dict[str, Tensor]:
        """The inputs of `add_to` for the patches of one grid."""
        side = int(len(self.table) ** 0.5)
        taps, weights = self.resample(places, rows, columns, side)
        return {"taps": taps.int(), "tap_weights": weights}

    def add_to(self, x: Tensor, values: Values) -> Tensor:
        """x plus the positions; may overwrite x."""
        taps, weights = values["taps"], values["tap_weights"]
        if x.is_cuda:
            from actors.kernels.triton.elementwise import add_positions_  # Triton needs CUDA

            add_positions_(x, self.table, taps, weights)
            return x
        return x + weighted(self.table, taps, weights).to(x.dtype)


@dataclass(frozen=True, slots=True)
class AntialiasedPositions:
    """Like Positions, but bilinear with antialiasing: every entry of the table may contribute, with
    a weight that is the product of one for its row and one for its column."""

    table: Tensor  # float32 [side x side, width]

    @property
    def side(self) -> int:
        return math.isqrt(len(self.table))

    def inputs(self, patches: int) -> Shapes:
        shape = (patches, self.side), torch.float32
        return {"row_weights": shape, "column_weights": shape}

    def inputs_of(self, places: Tensor, rows: int, columns: int) -> dict[str, Tensor]:
        row, column = places.unbind(1)
        return {
            "row_weights": antialiased_weights(rows, self.side)[row],
            "column_weights": antialiased_weights(columns, self.side)[column],
        }

    def add_to(self, x: Tensor, values: Values) -> Tensor:
        row, column = values["row_weights"], values["column_weights"]
        return x + ((row[:, :, None] * column[:, None]).flatten(1) @ self.table).to(x.dtype)


def places(rows: int, columns: int, merge: int) -> Tensor:
    """Row and column of each patch of a grid: int64 [rows x columns, 2].

    Equal to transformers.vision_utils.get_vision_position_ids.
    """
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    raster = torch.stack([row, column], -1)
    blocks = raster.view(rows // merge, merge, columns // merge, merge, 2)
    return blocks.transpose(1, 2).reshape(-1, 2)


def resized_table(
    table: Tensor,
    side: int,
    mode: Literal["bilinear", "bicubic"] = "bicubic",
    *,
    antialias: bool = True,
) -> Tensor:
    """A learned table of positions for views of side x side: float32 [side ** 2, width]."""
    table, trained = table.float(), math.isqrt(len(table))
    if side == trained:
        return table
    raster = table.T.reshape(1, -1, trained, trained)
    raster = F.interpolate(raster, size=(side, side), mode=mode, antialias=antialias)
    return raster.flatten(2)[0].T


def bilinear_taps(places: Tensor, rows: int, columns: int, side: int) -> tuple[Tensor, Tensor]:
    """Resamples a learned table of side x side positions to a grid: bilinear, corners aligned.

    Returns indices into the flat table, int64 [patches, 4], and their weights, float32, as
    transformers.vision_utils.get_vision_interpolation_indices_and_weights.
    """
    spans = torch.tensor([rows - 1, columns - 1]).clamp(min=1)
    return linear_taps(places.float() * (side - 1) / spans, side)


def centred_bilinear_taps(
    places: Tensor, rows: int, columns: int, side: int
) -> tuple[Tensor, Tensor]:
    """Like bilinear_taps, but with pixel centres aligned and borders repeated."""
    source = (places.float() + 0.5) * side / torch.tensor([rows, columns]) - 0.5
    return linear_taps(source, side)


def linear_taps(source: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Like bilinear_taps, for `source` [patches, 2], fractional rows and columns of the table."""
    floor = source.floor()
    below = floor.long()
    index = torch.stack([below, below + 1], -1).clamp(0, side - 1)
    share = source - floor
    weight = torch.stack([1 - share, share], -1)
    taps = index[:, 0, :, None] * side + index[:, 1, None, :]
    weights = weight[:, 0, :, None] * weight[:, 1, None, :]
    return taps.flatten(1), weights.flatten(1)


def antialiased_weights(size: int, side: int) -> Tensor:
    """Weights for resampling `side` entries to `size` along one axis: float32 [size, side]. Equal
    to torch's bilinear interpolate with antialias=True."""
    scale = side / size
    centres = (torch.arange(size, dtype=torch.float32)[:, None] + 0.5) * scale - 0.5
    weights = (1 - (torch.arange(side) - centres).abs() / max(scale, 1.0)).clamp(min=0)
    return weights / weights.sum(1, keepdim=True)


def bicubic_taps(places: Tensor, rows: int, columns: int, side: int) -> tuple[Tensor, Tensor]:
    """Like bilinear_taps, but bicubic with pixel centres aligned: [patches, 16].

    Equal to torch's interpolate and grid_sample with align_corners=False and repeated borders.
    """
    source = (places.float() + 0.5) * side / torch.tensor([rows, columns]) - 0.5
    floor = source.floor()
    offsets = torch.arange(-1, 3)
    index = (floor.long()[..., None] + offsets).clamp(0, side - 1)
    distance = ((source - floor)[..., None] - offsets).abs()
    near = ((CUBIC + 2) * distance - (CUBIC + 3)) * distance**2 + 1
    far = ((CUBIC * distance - 5 * CUBIC) * distance + 8 * CUBIC) * distance - 4 * CUBIC
    weight = torch.where(distance <= 1, near, far)
    taps = index[:, 0, :, None] * side + index[:, 1, None, :]
    weights = weight[:, 0, :, None] * weight[:, 1, None, :]
    return taps.flatten(1), weights.flatten(1)


def rotary_tables(
    length: int, head_size: int, theta: float, slower: float = 1.0
) -> tuple[Tensor, Tensor]:
    """cos and sin of one axis: float32 [length, head_size / 4]; rows and columns share them.

    `slower` scales all frequencies.
    """
    axis = head_size // 2
    frequencies = slower / theta ** (torch.arange(0, axis, 2, dtype=torch.float32) / axis)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()


def weighted(table: Tensor, taps: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums [rows, width] of a table's rows `taps` [rows, n]; `weights` float32 [rows,
    n]."""
    total = F.embedding(taps[:, 0], table) * weights[:, 0, None]
    for tap in range(1, taps.shape[1]):
        total = total + F.embedding(taps[:, tap], table) * weights[:, tap, None]
    return total
