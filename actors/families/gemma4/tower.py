"""The vision tower of Gemma 4: norms around attention and MLP, 3 x 3 patches pooled to a token.

Computes what transformers.models.gemma4 computes in Gemma4VisionModel and embed_vision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.families.gemma4 import audio
from actors.models.layers.block import Affine, BlockWeights, Style
from actors.models.layers.patches import Positions
from actors.models.layers.weights import (
    BlockNames,
    Dimensions,
    Weights,
    affine,
    expected_blocks,
    reordered,
)
from actors.models.packed import PackedParts, PackedTower
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec

PREFIXES = ("vision_tower.", "embed_vision.")

NAMES = BlockNames(
    block="encoder.layers",
    norm1="input_layernorm",
    qkv=tuple(f"self_attn.{part}_proj.linear" for part in "qkv"),
    proj="self_attn.o_proj.linear",
    norm2="pre_feedforward_layernorm",
    up=("mlp.gate_proj.linear", "mlp.up_proj.linear"),
    down="mlp.down_proj.linear",
    biased=False,
    qk_norm=("self_attn.q_norm", "self_attn.k_norm"),
    after=("post_attention_layernorm", "post_feedforward_layernorm"),
)
PATCHES = "patch_embedder.input_proj"
POSITIONS = "patch_embedder.position_embedding_table"
PROJECTOR = "embedding_projection"
STANDARD = ("std_bias", "std_scale")


def family(spec: ModelSpec) -> Family[Any]:
    if spec.audio:
        return audio.family(spec)
    tower, heads = Dimensions.read(spec), int(spec.vision["head_dim"])
    positions = int(spec.vision["position_embedding_size"])
    expected = {
        **affine(PATCHES, (tower.width, 3 * tower.patch_size**2), bias=False),
        POSITIONS: (2, positions, tower.width),
        **expected_blocks(NAMES, tower.depth, tower.width, tower.mlp_width, qk_size=heads),
        **affine(PROJECTOR, (spec.width, tower.width), bias=False),
    }
    if spec.vision["use_clipped_linears"]:
        linears = (*NAMES.qkv, NAMES.proj, *NAMES.up, NAMES.down)
        for layer, name, bound in product(range(tower.depth), linears, audio.BOUNDS):
            expected[f"{clipped_layer(layer, name)}.{bound}"] = ()
    if spec.vision["standardize"]:
        expected |= dict.fromkeys(STANDARD, (tower.width,))
    size = tower.rotary_head_size
    faint = (*(NAMES.after or ()), "self_attn.q_norm")
    return Family(PREFIXES, expected, size, parts, PackedTower, faint=faint)


def clipped_layer(layer: int, linear: str) -> str:
    return f"{NAMES.block}.{layer}.{linear.removesuffix('.linear')}"


def parts(spec: ModelSpec, weights: Weights) -> PackedParts:
    tower, epsilon = Dimensions.read(spec), float(spec.vision["rms_norm_eps"])
    width = tower.width
    table = weights.place(weights.tensors[POSITIONS].flatten(0, 1))
    projector = weights.affine(PROJECTOR).weight
    scale = math.sqrt(width)
    bias, factor = (
        [weights.tensors[name].float().to(table.device) for name in STANDARD]
        if spec.vision["standardize"]
        else (0.0, 1.0)
    )

    def head(x: Tensor, tapped: Sequence[Tensor]) -> Tensor:
        pooled = x.view(-1, tower.merge_size**2, width).float().mean(1) * scale
        rows = ((pooled - bias) * factor).to(x.dtype)
        return F.linear(F.rms_norm(rows, (width,), eps=epsilon), projector)

    def one_of_each_axis(
        places: Tensor, rows: int, columns: int, side: int
    ) -> tuple[Tensor, Tensor]:
        """One entry of the table of columns, and one of that of rows."""
        taps = places.flip(1) + torch.tensor([0, len(table) // 2])
        return taps, torch.ones(taps.shape)

    layers = [ours(layer, tower.heads) for layer in weights.blocks(NAMES, tower.depth)]
    if spec.vision["use_clipped_linears"]:
        layers = [clipped(layer, index, weights) for index, layer in enumerate(layers)]
    return PackedParts(
        embedding=weights.embedding(PATCHES, spec, channels_last=True),
        layers=layers,
        style=Style(tower.heads, "geglu_tanh", epsilon, norm="rms", both_norms=True),
        head=head,
        positions=Positions(table, one_of_each_axis, taps=2),
    )


def ours(layer: BlockWeights, heads: int) -> BlockWeights:
    """Converts a published layer: there, the first half of a head rotates with columns, the second
    with rows, each half against half. Scores are not scaled, and values are normalised."""
    assert layer.qk_norm is not None
    query, key = layer.qk_norm
    size = len(query)
    order = torch.arange(size).view(4, -1)[[2, 0, 3, 1]].flatten()
    norms = [query[order] * math.sqrt(size), key[order], torch.ones_like(query)]
    return replace(reordered(layer, heads, order), qk_norm=torch.stack(norms))


def clipped(layer: BlockWeights, index: int, weights: Weights) -> BlockWeights:
    """The layer with the bounds of its linear layers."""

    def clip(linear: Affine, *names: str) -> Affine:
        names = tuple(clipped_layer(index, name) for name in names)
        return replace(linear, clips=audio.bounds(weights, names))

    return replace(
        layer,
        qkv=clip(layer.qkv, *NAMES.qkv),
        proj=clip(layer.proj, NAMES.proj),
        up=clip(layer.up, *NAMES.up),
        down=clip(layer.down, NAMES.down),
    )
