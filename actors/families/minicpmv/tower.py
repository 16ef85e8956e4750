"""The vision tower of MiniCPM-V 4.6 and 4.7: SigLIP, which merges 2 x 2 patches between layers.

Computes what transformers.models.minicpmv4_6 computes in get_image_features: for each image the
rows of the whole image, then those of its slices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.families.clip.tower import LAST_NORM, NAMES, PATCHES, POSITIONS, tower_shapes
from actors.kernels.attention import Attention, Shapes, Values
from actors.models.layers.block import BlocksForm, BlockWeights, Style, layer_norm
from actors.models.layers.patches import Merger, Positions
from actors.models.layers.weights import Dimensions, Weights, affine
from actors.models.packed import PackedParts, SlicedTower
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec
from actors.types import ItemPlan

PREFIXES = ("vision_tower.", "merger.")

MERGED = "merged_"
"""Prefix of the attention inputs of the layers after the merger between layers."""

INNER = "vit_merger"
"""The name of that merger."""

LAST = "mlp.0"
"""The name of the merger after the layers."""
LAST_EPSILON = 1e-6  # of its norm: the configuration does not say


@dataclass(frozen=True, slots=True)
class MiniCpmParts:
    """The parts of the tower, on its device."""

    packed: PackedParts
    """Its layers are those before the merger."""
    merger: Callable[[Tensor], Tensor]
    """[patches, width] to [patches / 4, width]."""
    layers: Sequence[BlockWeights]
    """The layers after the merger."""


def family(spec: ModelSpec) -> Family[MiniCpmParts]:
    tower = Dimensions.read(spec)
    width, merged = tower.width, 4 * tower.width
    attention = ("q_proj", "k_proj", "v_proj", "out_proj")
    expected = {
        **tower_shapes(spec, tower),
        **affine(LAST_NORM, (width,)),
        **affine(f"{INNER}.layer_norm1", (width,)),
        **affine(f"{INNER}.pre_norm", (merged,)),
        **affine(f"{INNER}.linear_1", (4 * tower.mlp_width, merged)),
        **affine(f"{INNER}.linear_2", (width, 4 * tower.mlp_width)),
        **affine(f"{LAST}.pre_norm", (merged,)),
        **affine(f"{LAST}.linear_1", (merged, merged)),
        **affine(f"{LAST}.linear_2", (spec.width, merged)),
    }
    for name in attention:
        expected |= affine(f"{INNER}.self_attn.{name}", (width, width))
    return Family(PREFIXES, expected, tower.head_size, parts, MiniCpmTower)


def parts(spec: ModelSpec, weights: Weights) -> MiniCpmParts:
    tower, epsilon = Dimensions.read(spec), float(spec.vision["layer_norm_eps"])
    after, final = int(spec.vision["insert_layer_id"]) + 1, weights.affine(LAST_NORM)
    names = ("pre_norm", "linear_1", "linear_2")
    last = Merger(*(weights.affine(f"{LAST}.{name}") for name in names), epsilon=LAST_EPSILON)
    layers = weights.blocks(NAMES, tower.depth)
    table = weights.place(weights.tensors[f"{POSITIONS}.weight"])
    packed = PackedParts(
        embedding=weights.embedding(PATCHES, spec),
        layers=layers[:after],
        style=Style(tower.heads, "gelu_tanh", epsilon),
        head=lambda x, tapped: last(layer_norm(x, final, epsilon)),
        positions=Positions(table, nearest_taps, taps=1),
        rotary=False,
    )
    return MiniCpmParts(packed, window_merger(spec, weights), layers[after:])


def window_merger(spec: ModelSpec, weights: Weights) -> Callable[[Tensor], Tensor]:
    """transformers: MiniCPMV4_6ViTWindowAttentionMerger."""
    tower, epsilon = Dimensions.read(spec), float(spec.vision["layer_norm_eps"])
    first, norm, up, down, proj = (
        weights.affine(f"{INNER}.{name}")
        for name in ("layer_norm1", "pre_norm", "linear_1", "linear_2", "self_attn.out_proj")
    )
    qkv = weights.affine(*(f"{INNER}.self_attn.{name}_proj" for name in "qkv"))

    def merge(x: Tensor) -> Tensor:
        # From rows of four patches in a block of 4 x 4 to windows of 2 x 2, row by row.
        x = x.view(-1, 2, 2, 2, 2, tower.width).transpose(2, 3).reshape(-1, 4, tower.width)
        seen = qkv.linear(layer_norm(x, first, epsilon)).unflatten(-1, (3, tower.heads, -1))
        query, key, value = seen.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value)
        x = x + proj.linear(attended.transpose(1, 2).flatten(2))
        y = up.linear(layer_norm(x.flatten(1), norm, epsilon))
        return down.linear(F.gelu(y, approximate="tanh")) + x.mean(1)

    return merge


class MiniCpmTower(SlicedTower):
    """A sliced tower whose layers after the merger see a quarter of the rows."""

    def __init__(
        self, spec: ModelSpec, parts: MiniCpmParts, attention: Attention, blocks: BlocksForm
    ) -> None:
        super().__init__(spec, parts.packed, attention, blocks)
        self.merger = parts.merger
        self.later_blocks = blocks(parts.layers, parts.packed.style, attention, ())

    def inputs(self, path: str, tokens: int, segments: int) -> Shapes:
        pictures, patches = self.most_pictures(tokens, segments), tokens * self.sizing.merge_size**2
        merged = self.attention.inputs(patches // 4, pictures)
        shapes = super().inputs(path, tokens, segments)
        return shapes | {MERGED + name: shape for name, shape in merged.items()}

    def metadata(
        self, path: str, plans: Sequence[ItemPlan], tokens: int, segments: int
    ) -> dict[str, Tensor]:
        pictures, patches = self.most_pictures(tokens, segments), tokens * self.sizing.merge_size**2
        lengths = [rows * columns // 4 for rows, columns in self.pictures(plans)]
        merged = self.attention.metadata(lengths, patches // 4, pictures)
        values = super().metadata(path, plans, tokens, segments)
        return values | {MERGED + name: value for name, value in merged.items()}

    def forward(self, path: str, values: Values) -> Tensor:
        x, _ = self.blocks(self.begin(values), None, None, values)
        merged = {
            name.removeprefix(MERGED): value
            for name, value in values.items()
            if name.startswith(MERGED)
        }
        x, _ = self.later_blocks(self.merger(x), None, None, merged)
        return self.end(x, (), values)


def nearest_taps(places: Tensor, rows: int, columns: int, side: int) -> tuple[Tensor, Tensor]:
    """Like patches.bilinear_taps, with one entry per place: [patches, 1]. Equal to
    transformers.vision_utils.get_vision_nearest_position_ids."""
    bounds = torch.arange(1 / side, 1.0, 1 / side)
    row, column = (
        torch.bucketize(torch.arange(count) / count, bounds, right=True)[each]
        for count, each in zip((rows, columns), places.unbind(1), strict=True)
    )
    taps = (row * side + column)[:, None]
    return taps, torch.ones(taps.shape)
