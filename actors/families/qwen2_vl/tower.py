"""The vision towers of Qwen2-VL, Qwen2.5-VL, Qwen2.5-Omni and EXAONE 4.5: no learned positions.

All but Qwen2-VL have RMS norms, SwiGLU, and windows in all but a few layers. Their patches arrive
window by window (WindowedSizing), so that segments are contiguous in both kinds of layers; rows
return to raster order at the very end. Computes what transformers computes in
Qwen2VisionTransformerPretrainedModel, Qwen2_5_VisionTransformerPretrainedModel and
Exaone4_5_VisionModel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.kernels.attention import Attention, Shapes, Values
from actors.models.layers.block import WINDOW, BlocksForm, Style
from actors.models.layers.patches import Merger
from actors.models.layers.weights import (
    BlockNames,
    Dimensions,
    Weights,
    affine,
    expected_blocks,
    with_keys_for_each_head,
)
from actors.models.packed import CACHED_GRIDS, PackedParts, PackedTower, grids_of
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec
from actors.spec.sizing import WindowedSizing
from actors.types import ItemPlan

PREFIXES = ("visual.", "thinker.visual.")

NAMES = BlockNames(up=("mlp.fc1",), down="mlp.fc2")

NAMES_25 = BlockNames(
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    unbiased=frozenset({"norm1", "norm2"}),
)
NAMES_OMNI = replace(NAMES_25, qkv=("attn.q", "attn.k", "attn.v"))


def family(spec: ModelSpec) -> Family[PackedParts]:
    tower, names = dimensions(spec), names_of(spec)
    patch = (3, int(spec.vision["temporal_patch_size"]), tower.patch_size, tower.patch_size)
    expected = {
        **affine("patch_embed.proj", (tower.width, *patch), bias=False),
        **expected_blocks(names, tower.depth, tower.width, tower.mlp_width),
        **affine("merger.ln_q", (tower.width,), bias=names is NAMES),
        **affine("merger.mlp.0", (tower.merged, tower.merged)),
        **affine("merger.mlp.2", (spec.width, tower.merged)),
    }
    rows = tower.width + 2 * key_heads(spec) * tower.head_size
    if rows != 3 * tower.width:
        for layer in range(tower.depth):
            expected |= affine(f"blocks.{layer}.attn.qkv", (rows, tower.width))
    kind = PackedTower if names is NAMES else WindowedTower
    return Family(PREFIXES, expected, tower.rotary_head_size, parts, kind)


def names_of(spec: ModelSpec) -> BlockNames:
    if spec.family == "qwen2_5_omni":
        return NAMES_OMNI
    return NAMES if spec.family == "qwen2_vl" else NAMES_25


def key_heads(spec: ModelSpec) -> int:
    """Heads of keys, and of values."""
    heads = dimensions(spec).heads
    return int(spec.vision["num_key_value_heads"]) if spec.family == "exaone4_5" else heads


def dimensions(spec: ModelSpec) -> Dimensions:
    """The `hidden_size` of Qwen2-VL is the language model's."""
    if spec.family != "qwen2_vl":
        return Dimensions.read(spec)
    read = Dimensions.read(spec, width="embed_dim", mlp_width="mlp_ratio")
    return replace(read, mlp_width=read.mlp_width * read.width)


def parts(spec: ModelSpec, weights: Weights) -> PackedParts:
    tower = dimensions(spec)
    if spec.family == "qwen2_vl":
        style = Style(tower.heads, "quick_gelu")
    else:
        windowed = frozenset(range(tower.depth)) - set(spec.vision["fullatt_block_indexes"])
        style = Style(tower.heads, "swiglu", norm="rms", windowed=windowed)
    norm, up, down = (weights.affine(f"merger.{name}") for name in ("ln_q", "mlp.0", "mlp.2"))
    merger = Merger(norm, up, down, kind=style.norm)
    return PackedParts(
        embedding=weights.embedding("patch_embed.proj", spec),
        later=weights.later_embedding("patch_embed.proj", spec),
        layers=[
            with_keys_for_each_head(layer, tower.heads, key_heads(spec))
            for layer in weights.blocks(names_of(spec), tower.depth)
        ],
        style=style,
        head=lambda x, tapped: merger(x),
    )


class WindowedTower(PackedTower):
    """A packed tower whose patches are ordered window by window within each grid."""

    def __init__(
        self, spec: ModelSpec, parts: PackedParts, attention: Attention, blocks: BlocksForm
    ) -> None:
        super().__init__(spec, parts, attention, blocks)
        assert isinstance(spec.sizing, WindowedSizing)
        self.window = spec.sizing.window
        self.windows = lru_cache(CACHED_GRIDS)(spec.sizing.order)

    def inputs(self, path: str, tokens: int, segments: int) -> Shapes:
        patches = tokens * self.sizing.merge_size**2
        windows = self.attention.inputs(patches, self.most_windows(tokens, segments))
        return {
            **super().inputs(path, tokens, segments),
            **{WINDOW + name: shape for name, shape in windows.items()},
            "rows": ((tokens,), torch.int32),
        }

    def metadata(
        self, path: str, plans: Sequence[ItemPlan], tokens: int, segments: int
    ) -> dict[str, Tensor]:
        unit = self.sizing.merge_size**2
        orders, sizes = zip(*(self.windows(*grid) for grid in grids_of(plans)), strict=True)
        starts = [0, *accumulate(len(order) for order in orders[:-1])]
        rows = torch.cat(
            [
                torch.from_numpy(order.argsort() + start)
                for order, start in zip(orders, starts, strict=True)
            ]
        )
        lengths = [unit * size for each in sizes for size in each]
        windows = self.attention.metadata(
            lengths, tokens * unit, self.most_windows(tokens, segments)
        )
        return {
            **super().metadata(path, plans, tokens, segments),
            **{WINDOW + name: value for name, value in windows.items()},
            # Padded, because what an earlier, larger pack left there may exceed this budget.
            "rows": F.pad(rows, (0, tokens - len(rows))).int(),
        }

    def forward(self, path: str, values: Values) -> Tensor:
        return super().forward(path, values).index_select(0, values["rows"])

    def rows_of_grid(self, rows: int, columns: int) -> dict[str, Tensor]:
        """Like PackedTower, but window by window."""
        order = torch.from_numpy(self.windows(rows, columns)[0])
        return {
            name: value.unflatten(0, (len(order), -1))[order].flatten(0, 1)
            for name, value in super().rows_of_grid(rows, columns).items()
        }

    def most_windows(self, tokens: int, segments: int) -> int:
        """An upper bound for grids with this many tokens in all. A narrow grid wastes up to a
        window's side."""
        return tokens // self.window + segments
