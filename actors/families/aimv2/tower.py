"""AIMv2: RMS norms, SwiGLU, and a norm before the positions are added.

Computes what transformers.models.aimv2 computes as `last_hidden_state` of Aimv2VisionModel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from actors.models.layers.block import Style, rms_norm
from actors.models.layers.weights import (
    BlockNames,
    Dimensions,
    Expected,
    Weights,
    affine,
    expected_blocks,
    table_side,
)
from actors.models.tiled import TileParts, TileTower, merge_order
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec

PATCHES = "embeddings.patch_embed"
FIRST_NORM = "embeddings.rms_norm"
POSITIONS = "embeddings.position_embedding"
LAST_NORM = "rms_norm"

UNUSED = frozenset(
    {
        "head.cls_token",
        *affine("head.k_proj", (1,)),
        *affine("head.v_proj", (1,)),
        *affine("head.output_proj", (1,)),
    }
)
"""The pooling head, which rows do not need."""


def family(spec: ModelSpec) -> Family[TileParts]:
    head_size = Dimensions.read(spec).head_size
    return Family(("",), tower_shapes(spec), head_size, parts, TileTower, UNUSED)


def names_of(spec: ModelSpec, root: str = "") -> BlockNames:
    qkv = tuple(f"attention.{part}_proj" for part in "qkv")
    proj, up, down = "attention.out_proj", ("ffn.gate_proj", "ffn.up_proj"), "ffn.down_proj"
    norms = "rms_norm1", "rms_norm2"
    attention = () if spec.vision["qkv_bias"] else (*qkv, proj)
    mlp = () if spec.vision["mlp_bias"] else (*up, down)
    return BlockNames(
        block=f"{root}encoder.layers",
        norm1=norms[0],
        qkv=qkv,
        proj=proj,
        norm2=norms[1],
        up=up,
        down=down,
        unbiased=frozenset({*norms, *attention, *mlp}),
    )


def tower_shapes(spec: ModelSpec, root: str = "", patches: str = PATCHES) -> Expected:
    """`root`: what precedes all names. `patches`: the name of the patch embedding."""
    tower = Dimensions.read(spec)
    return {
        **affine(root + patches, (tower.width, 3, tower.patch_size, tower.patch_size)),
        **affine(root + FIRST_NORM, (tower.width,), bias=False),
        **affine(root + POSITIONS, (table_side(spec) ** 2, tower.width), bias=False),
        **expected_blocks(names_of(spec, root), tower.depth, tower.width, tower.mlp_width),
        **affine(root + LAST_NORM, (tower.width,), bias=False),
    }


def parts(
    spec: ModelSpec,
    weights: Weights,
    root: str = "",
    patches: str = PATCHES,
    head: Callable[[Tensor], Tensor] = lambda x: x,
) -> TileParts:
    """`head`: what follows the last norm."""
    tower, epsilon = Dimensions.read(spec), float(spec.vision["rms_norm_eps"])
    first, last = (weights.affine(root + name) for name in (FIRST_NORM, LAST_NORM))
    raster = weights.tensors[f"{root}{POSITIONS}.weight"]
    positions = weights.place(merge_order(raster, tower.merge_size))

    def end(x: Tensor) -> Tensor:
        return head(rms_norm(x.view(-1, tower.width), last, epsilon).view(-1, tower.merged))

    return TileParts(
        embedding=weights.embedding(root + patches, spec).weight,
        start=weights.start(root + patches, spec, torch.zeros_like(raster, dtype=torch.float32)),
        layers=weights.blocks(names_of(spec, root), tower.depth),
        style=Style(tower.heads, "swiglu", epsilon, norm="rms"),
        head=end,
        stem=lambda x: rms_norm(x, first, epsilon) + positions,
    )
