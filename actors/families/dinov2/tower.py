"""DINOv2's tower: layer scale, and a table of positions that is resampled to the images' size.

Computes what transformers.models.dinov2 and dinov2_with_registers compute as `last_hidden_state`;
with `model.output: vector`, as `pooler_output`.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from actors.models.layers.block import Style
from actors.models.layers.patches import resized_table
from actors.models.layers.weights import (
    BlockNames,
    Dimensions,
    Expected,
    Weights,
    affine,
    expected_blocks,
    table_side,
)
from actors.models.tiled import TileParts, TileTower, class_head
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec
from actors.spec.tiles import OneTile

PREFIXES = ("dinov2.", "dinov2_with_registers.", "")
"""The first two are for checkpoints with a classifier."""
UNUSED = frozenset({"embeddings.mask_token", *affine("classifier", (1,))})

NAMES = BlockNames(
    block="encoder.layer",
    norm1="norm1",
    qkv=tuple(f"attention.attention.{name}" for name in ("query", "key", "value")),
    proj="attention.output.dense",
    norm2="norm2",
    up=("mlp.fc1",),
    down="mlp.fc2",
    scales=("layer_scale1.lambda1", "layer_scale2.lambda1"),
)
GATED = replace(NAMES, up=("mlp.weights_in",), down="mlp.weights_out")

PATCHES = "embeddings.patch_embeddings.projection"
LAST_NORM = "layernorm"


def family(spec: ModelSpec) -> Family[TileParts]:
    return Family(
        PREFIXES, expected(spec), Dimensions.read(spec).head_size, parts, TileTower, UNUSED
    )


def names_of(spec: ModelSpec) -> BlockNames:
    return GATED if spec.vision["use_swiglu_ffn"] else NAMES


def expected(spec: ModelSpec) -> Expected:
    tower, names = Dimensions.read(spec), names_of(spec)
    shapes = {
        "embeddings.cls_token": (1, 1, tower.width),
        "embeddings.position_embeddings": (1, 1 + table_side(spec) ** 2, tower.width),
        **affine(PATCHES, (tower.width, 3, tower.patch_size, tower.patch_size)),
        **expected_blocks(names, tower.depth, tower.width, tower.mlp_width),
        **affine(LAST_NORM, (tower.width,)),
    }
    if names is GATED:  # gate and up are one layer
        for layer in range(tower.depth):
            up = f"{names.block}.{layer}.{names.up[0]}"
            shapes |= affine(up, (2 * tower.mlp_width, tower.width))
    if registered(spec):
        registers = int(spec.vision["num_register_tokens"])
        shapes["embeddings.register_tokens"] = (1, registers, tower.width)
    return shapes


def parts(spec: ModelSpec, weights: Weights) -> TileParts:
    assert isinstance(spec.sizing, OneTile)
    tower, epsilon = Dimensions.read(spec), float(spec.vision["layer_norm_eps"])
    table, classes = (
        weights.tensors[f"embeddings.{name}"][0].float()
        for name in ("position_embeddings", "cls_token")
    )
    classes = table[:1] + classes
    if registered(spec):
        classes = torch.cat([classes, weights.tensors["embeddings.register_tokens"][0].float()])
    positions = resized_table(table[1:], spec.sizing.side_patches, antialias=registered(spec))
    return TileParts(
        embedding=weights.embedding(PATCHES, spec).weight,
        start=weights.start(PATCHES, spec, positions, classes),
        layers=weights.blocks(names_of(spec), tower.depth),
        style=Style(tower.heads, "swiglu" if spec.vision["use_swiglu_ffn"] else "gelu", epsilon),
        head=class_head(spec, weights.affine(LAST_NORM), epsilon),
    )


def registered(spec: ModelSpec) -> bool:
    """Whether there are register tokens. If so, transformers resamples positions with
    antialiasing."""
    return spec.family == "dinov2_with_registers"
