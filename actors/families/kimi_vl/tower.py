"""The vision tower of Kimi-VL (MoonViT) with its projector; Kimi-K2.5 builds on it.

Its rotary embedding rotates neighbouring values of a head, columns before rows; ours rotates
halves, rows before columns: q and k are permuted once, at load, which leaves the scores unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from actors.models.layers.block import Affine, BlockWeights, Style, layer_norm
from actors.models.layers.patches import Merger, Positions, bicubic_taps
from actors.models.layers.weights import (
    LAYERS,
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

PREFIXES = ("vision_tower.", "multi_modal_projector.", "mm_projector.")

PROJECTOR = ("linear_1", "linear_2")

NAMES = BlockNames(
    block="encoder.blocks",
    norm1="norm0",
    qkv=("wqkv",),
    proj="wo",
    norm2="norm1",
    up=("mlp.fc0",),
    down="mlp.fc1",
)

LAST_NORM = "encoder.final_layernorm"

EPSILON = 1e-5  # torch's default for LayerNorm: the configuration does not say


def family(spec: ModelSpec) -> Family[PackedParts]:
    return Family(PREFIXES, expected, dimensions, parts, PackedTower)


def dimensions(spec: ModelSpec) -> Dimensions:
    return Dimensions.read(spec, **LAYERS, merge_size="merge_kernel_size")


def expected(spec: ModelSpec, projector: tuple[str, str] = PROJECTOR) -> Expected:
    tower = dimensions(spec)
    side = int(spec.vision["init_pos_emb_height"])
    up, down = projector
    return {
        **affine("patch_embed.proj", (tower.width, 3, tower.patch_size, tower.patch_size)),
        **affine("patch_embed.pos_emb", (side, side, tower.width), bias=False),
        **expected_blocks(NAMES, tower.depth, tower.width, tower.mlp_width),
        **affine(LAST_NORM, (tower.width,)),
        **affine("pre_norm", (tower.width,)),
        **affine(up, (tower.merged, tower.merged)),
        **affine(down, (spec.width, tower.merged)),
    }


def parts(spec: ModelSpec, weights: Weights, projector: tuple[str, str] = PROJECTOR) -> PackedParts:
    tower = dimensions(spec)
    final, merger = weights.affine(LAST_NORM), projection(weights, projector)

    def head(x: Tensor, tapped: Sequence[Tensor]) -> Tensor:
        return merger(layer_norm(x, final, EPSILON))

    table = weights.place(weights.tensors["patch_embed.pos_emb.weight"].flatten(0, 1))
    return PackedParts(
        embedding=weights.embedding("patch_embed.proj", spec.mean, spec.std),
        later=weights.later_embedding("patch_embed.proj", spec.std),
        layers=[permuted(layer, tower) for layer in weights.blocks(NAMES, tower.depth)],
        style=Style(tower.heads, "gelu_tanh", epsilon=EPSILON),
        head=head,
        positions=Positions(table, bicubic_taps, taps=16),
    )


def projection(weights: Weights, names: tuple[str, str]) -> Merger:
    up, down = (weights.affine(name) for name in names)
    return Merger(weights.affine("pre_norm"), up, down, epsilon=EPSILON)


def permuted(layer: BlockWeights, tower: Dimensions) -> BlockWeights:
    """The layer with each head of q and k in the order of our rotary embedding."""
    pairs = torch.arange(tower.head_size, device=layer.qkv.weight.device).view(-1, 2)
    columns, rows = pairs[0::2], pairs[1::2]
    order = torch.cat([rows, columns]).t().flatten()

    def heads(values: Tensor) -> Tensor:
        query, key, value = values.unflatten(0, (3, tower.heads, tower.head_size))
        return torch.stack([query[:, order], key[:, order], value]).flatten(0, 2)

    return replace(layer, qkv=Affine(heads(layer.qkv.weight), heads(layer.qkv.bias)))
