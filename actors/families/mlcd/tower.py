"""MLCD's tower: CLIP's, with positions that rotate. Those of the class token are learned.

Computes what transformers.models.mlcd computes as `last_hidden_state`; with `model.output: vector`,
as `pooler_output`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from actors.families.clip import tower as clip
from actors.families.clip.tower import CLASS, LAST_NORM, NAMES, PATCHES, POSITIONS
from actors.models.layers.block import Style, layer_norm
from actors.models.layers.patches import places, rotary_tables
from actors.models.layers.weights import Expected, Weights, affine
from actors.models.tiled import TileParts, TileTower
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import rope_theta
from actors.spec.tiles import OneTile

PREFIXES = ("vision_model.", "")

FIRST_NORM = "pre_layrnorm"
CLASS_PLACE = "class_pos_emb"
"""The name of the class token's angles."""


def family(spec: ModelSpec) -> Family[TileParts]:
    head_size, shapes = clip.dimensions(spec).rotary_head_size, expected(spec)
    return Family(PREFIXES, shapes, head_size, parts, TileTower, clip.unused(spec))


def expected(spec: ModelSpec) -> Expected:
    tower = clip.dimensions(spec)
    shapes = clip.tower_shapes(spec, tower, clip=True) | {CLASS_PLACE: (1, tower.head_size // 2)}
    del shapes[f"{POSITIONS}.weight"]
    return shapes | (affine(LAST_NORM, (tower.width,)) if spec.vector else {})


def parts(spec: ModelSpec, weights: Weights) -> TileParts:
    assert isinstance(spec.sizing, OneTile)
    tower, rows, side = clip.dimensions(spec), spec.sizing.tile_tokens, spec.sizing.side_patches
    first, epsilon = weights.affine(FIRST_NORM), float(spec.vision["layer_norm_eps"])
    last = weights.affine(LAST_NORM) if spec.vector else None

    def head(x: Tensor) -> Tensor:
        if not last:
            return x
        return layer_norm(x.view(-1, rows, tower.width)[:, 0], last, epsilon)

    classes, angles = (weights.tensors[name].float() for name in (CLASS, CLASS_PLACE))
    cos, sin = rotary_tables(side, tower.head_size, rope_theta(spec.vision))
    grid, device = places(side, side, 1), weights.device
    nowhere = torch.zeros(side**2, tower.width, device=classes.device)
    return TileParts(
        embedding=weights.embedding(PATCHES, spec).weight,
        start=weights.start(PATCHES, spec, nowhere, classes[None]),
        layers=weights.blocks(NAMES, tower.depth),
        style=Style(tower.heads, clip.ACTIVATIONS[spec.vision["hidden_act"]], epsilon),
        head=head,
        stem=lambda x: layer_norm(x, first, epsilon),
        rotary=(
            torch.cat([angles.cos().to(device), cos[grid].flatten(1).to(device)]),
            torch.cat([angles.sin().to(device), sin[grid].flatten(1).to(device)]),
        ),
    )
