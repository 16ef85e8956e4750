"""The vision tower of Qwen2-VL: no learned positions, quick GELU, one merger.

Computes what transformers.models.qwen2_vl computes in Qwen2VisionTransformerPretrainedModel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from actors.models.layers.block import Style
from actors.models.layers.patches import Merger
from actors.models.layers.weights import (
    BlockNames,
    Dimensions,
    Expected,
    Weights,
    affine,
    expected_blocks,
)
from actors.models.packed import PackedParts, PackedTower
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec

PREFIXES = ("visual.", "model.visual.")  # as published, and as some copies have it

NAMES = BlockNames(up=("mlp.fc1",), down="mlp.fc2")


def family(spec: ModelSpec) -> Family[PackedParts]:
    return Family(PREFIXES, expected, dimensions, parts, PackedTower)


def dimensions(spec: ModelSpec) -> Dimensions:
    """`hidden_size` is the language model's."""
    read = Dimensions.read(spec, width="embed_dim", mlp_width="mlp_ratio")
    return replace(read, mlp_width=read.mlp_width * read.width)


def expected(spec: ModelSpec) -> Expected:
    return shapes(spec, dimensions(spec), NAMES, norm_bias=True)


def shapes(spec: ModelSpec, tower: Dimensions, names: BlockNames, *, norm_bias: bool) -> Expected:
    """Shared by Qwen2-VL and Qwen2.5-VL."""
    patch = (3, int(spec.vision["temporal_patch_size"]), tower.patch_size, tower.patch_size)
    return {
        **affine("patch_embed.proj", (tower.width, *patch), bias=False),
        **expected_blocks(names, tower.depth, tower.width, tower.mlp_width),
        **affine("merger.ln_q", (tower.width,), bias=norm_bias),
        **affine("merger.mlp.0", (tower.merged, tower.merged)),
        **affine("merger.mlp.2", (spec.width, tower.merged)),
    }


def parts(spec: ModelSpec, weights: Weights) -> PackedParts:
    tower = dimensions(spec)
    return packed_parts(spec, weights, tower.depth, NAMES, Style(tower.heads, "quick_gelu"))


def packed_parts(
    spec: ModelSpec, weights: Weights, depth: int, names: BlockNames, style: Style
) -> PackedParts:
    """Shared by Qwen2-VL and Qwen2.5-VL."""
    merger = Merger(
        norm=weights.affine("merger.ln_q"),
        up=weights.affine("merger.mlp.0"),
        down=weights.affine("merger.mlp.2"),
        kind=style.norm,
    )

    def head(x: Tensor, tapped: Sequence[Tensor]) -> Tensor:
        return merger(x)

    return PackedParts(
        embedding=weights.embedding("patch_embed.proj", spec.mean, spec.std),
        later=weights.later_embedding("patch_embed.proj", spec.std),
        layers=weights.blocks(names, depth),
        style=style,
        head=head,
    )
