"""DINOv3's tower: layer scale, and positions that rotate the patches but no other tokens.

Computes what transformers.models.dinov3_vit computes as `last_hidden_state`; with `model.output:
vector`, as `pooler_output`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.models.layers.block import Style
from actors.models.layers.weights import (
    BlockNames,
    Dimensions,
    Expected,
    Weights,
    affine,
    expected_blocks,
)
from actors.models.tiled import TileParts, TileTower, class_head
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec
from actors.spec.tiles import OneTile

UNUSED = frozenset({"embeddings.mask_token"})

PATCHES = "embeddings.patch_embeddings"
LAST_NORM = "norm"


def family(spec: ModelSpec) -> Family[TileParts]:
    head_size = Dimensions.read(spec).rotary_head_size
    return Family(("",), expected(spec), head_size, parts, TileTower, UNUSED)


def names_of(spec: ModelSpec) -> BlockNames:
    gate = ("mlp.gate_proj",) if spec.vision["use_gated_mlp"] else ()
    up, down = (*gate, "mlp.up_proj"), "mlp.down_proj"
    qkv = ("attention.q_proj", "attention.k_proj", "attention.v_proj")
    proj, vision = "attention.o_proj", spec.vision
    biases = dict(zip(qkv, ("query_bias", "key_bias", "value_bias"), strict=True))
    biases |= {proj: "proj_bias", **dict.fromkeys((*up, down), "mlp_bias")}
    return BlockNames(
        block="layer",
        norm1="norm1",
        qkv=qkv,
        proj=proj,
        norm2="norm2",
        up=up,
        down=down,
        unbiased=frozenset(name for name, key in biases.items() if not vision[key]),
        scales=("layer_scale1.lambda1", "layer_scale2.lambda1"),
    )


def expected(spec: ModelSpec) -> Expected:
    tower, registers = Dimensions.read(spec), int(spec.vision["num_register_tokens"])
    return {
        "embeddings.cls_token": (1, 1, tower.width),
        "embeddings.register_tokens": (1, registers, tower.width),
        **affine(PATCHES, (tower.width, 3, tower.patch_size, tower.patch_size)),
        **expected_blocks(names_of(spec), tower.depth, tower.width, tower.mlp_width),
        **affine(LAST_NORM, (tower.width,)),
    }


def parts(spec: ModelSpec, weights: Weights) -> TileParts:
    assert isinstance(spec.sizing, OneTile)
    tower, epsilon = Dimensions.read(spec), float(spec.vision["layer_norm_eps"])
    tokens = [weights.tensors[f"embeddings.{name}"][0].float() for name in TOKENS]
    nowhere = torch.zeros(spec.sizing.side_patches**2, tower.width, device=tokens[0].device)
    cos, sin = rotary(spec.sizing.side_patches, tower.head_size, float(spec.vision["rope_theta"]))
    before = (0, 0, spec.sizing.class_tokens, 0)
    return TileParts(
        embedding=weights.embedding(PATCHES, spec).weight,
        start=weights.start(PATCHES, spec, nowhere, torch.cat(tokens)),
        layers=weights.blocks(names_of(spec), tower.depth),
        style=Style(tower.heads, "swiglu" if spec.vision["use_gated_mlp"] else "gelu", epsilon),
        head=class_head(spec, weights.affine(LAST_NORM), epsilon),
        rotary=(
            F.pad(cos, before, value=1.0).to(weights.device),
            F.pad(sin, before).to(weights.device),
        ),
    )


TOKENS = ("cls_token", "register_tokens")


def rotary(side: int, head_size: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos, sin of side x side patches: float32 [side ** 2, head size / 2], rows before columns.
    Positions are from -1 to 1, whatever the side."""
    places = (torch.arange(side, dtype=torch.float32) + 0.5) / side * 2 - 1
    frequencies = 1 / theta ** torch.arange(0, 1, 4 / head_size, dtype=torch.float32)
    angles = 2 * math.pi * torch.cartesian_prod(places, places)[:, :, None] * frequencies
    return angles.flatten(1).cos(), angles.flatten(1).sin()
