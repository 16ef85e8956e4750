"""The vision tower of Qwen2-VL: no learned positions, quick GELU, one merger.

Computes what transformers.models.qwen2_vl.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel
computes for images, under the checkpoint's own names. Knows nothing of graphs or budgets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from actors.models.layers.block import Style
from actors.models.packed import Merger
from actors.models.packed_tower import Parts
from actors.models.packed_weights import (
    BlockNames,
    Dimensions,
    Expected,
    Weights,
    affine,
    expected_blocks,
)
from actors.spec.model_spec import ModelSpec

PREFIXES = ("visual.", "model.visual.")
"""What the tower's tensors are called in a checkpoint: as published, as some have resaved it."""

NAMES = BlockNames(up=("mlp.fc1",), down="mlp.fc2")


def dimensions(spec: ModelSpec) -> Dimensions:
    """Raises CheckpointError for a key that is missing. `hidden_size` is the language model's."""
    read = Dimensions.read(spec, width="embed_dim", mlp_width="mlp_ratio")
    return replace(read, mlp_width=read.mlp_width * read.width)


def expected(spec: ModelSpec) -> Expected:
    """Name and shape of every tensor of the tower, without the checkpoint's prefix."""
    tower = dimensions(spec)
    patch = (3, int(spec.vision["temporal_patch_size"]), tower.patch_size, tower.patch_size)
    return {
        **affine("patch_embed.proj", (tower.width, *patch), bias=False),
        **expected_blocks(NAMES, tower.depth, tower.width, tower.mlp_width),
        **affine("merger.ln_q", (tower.width,)),
        **affine("merger.mlp.0", (tower.merged, tower.merged)),
        **affine("merger.mlp.2", (spec.width, tower.merged)),
    }


def parts(spec: ModelSpec, weights: Weights) -> Parts:
    """The tower's, from tensors as `expected` names them."""
    tower = dimensions(spec)
    merger = Merger(
        norm=weights.affine("merger.ln_q"),
        up=weights.affine("merger.mlp.0"),
        down=weights.affine("merger.mlp.2"),
    )

    def head(x: Tensor, tapped: Sequence[Tensor]) -> Tensor:
        return merger(x)

    return Parts(
        embedding=weights.embedding("patch_embed.proj", spec.mean, spec.std),
        later=weights.later_embedding("patch_embed.proj", spec.std),
        layers=weights.blocks(NAMES, tower.depth),
        style=Style(tower.heads, "quick_gelu"),
        head=head,
    )
