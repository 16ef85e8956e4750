"""The vision tower of Janus: SigLIP's blocks, normed, and an aligner of linear layers with GELU.

Computes what transformers.models.janus computes in get_image_features.
"""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from actors.families.clip import tower as clip
from actors.models.layers.block import Style, layer_norm
from actors.models.layers.weights import (
    Dimensions,
    Weights,
    affine,
    expected_blocks,
    numbered,
    table_side,
)
from actors.models.tiled import TileParts, TileTower
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec

PREFIXES = ("vision_model.", "aligner.")

NAMES = replace(clip.NAMES, proj="self_attn.projection_layer")


def family(spec: ModelSpec) -> Family[TileParts]:
    tower = dimensions(spec)
    first, *others = aligner(spec)
    expected = {
        **affine(clip.PATCHES, (tower.width, 3, tower.patch_size, tower.patch_size)),
        **affine(clip.POSITIONS, (table_side(spec) ** 2, tower.width), bias=False),
        **expected_blocks(NAMES, tower.depth, tower.width, tower.mlp_width),
        **affine(clip.LAST_NORM, (tower.width,)),
        **affine(first, (spec.width, tower.width)),
    }
    for layer in others:
        expected |= affine(layer, (spec.width, spec.width))
    return Family(PREFIXES, expected, tower.head_size, parts, TileTower)


def dimensions(spec: ModelSpec) -> Dimensions:
    """`depth` in `vision_config` is the aligner's, not the tower's."""
    keys = {"depth": "num_hidden_layers", "heads": "num_attention_heads"}
    read = Dimensions.read(spec, **keys, mlp_width="hidden_size")
    return replace(read, mlp_width=int(read.width * spec.vision["mlp_ratio"]))


def aligner(spec: ModelSpec) -> list[str]:
    """The names of the aligner's layers."""
    return ["fc1", *numbered("hidden_layers", int(spec.vision["depth"]) - 1)]


def parts(spec: ModelSpec, weights: Weights) -> TileParts:
    tower, epsilon = dimensions(spec), float(spec.vision["layer_norm_eps"])
    last = weights.affine(clip.LAST_NORM)
    first, *others = (weights.affine(name) for name in aligner(spec))

    def head(x: Tensor) -> Tensor:
        x = first.linear(layer_norm(x, last, epsilon))
        for layer in others:
            x = layer.linear(F.gelu(x))
        return x

    positions = weights.tensors[f"{clip.POSITIONS}.weight"].float()
    return TileParts(
        embedding=weights.embedding(clip.PATCHES, spec).weight,
        start=weights.start(clip.PATCHES, spec, positions),
        layers=weights.blocks(NAMES, tower.depth),
        style=Style(tower.heads, "gelu", epsilon),
        head=head,
    )
