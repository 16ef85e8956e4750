"""The vision tower of Kimi-VL and Kimi-K2.5 (MoonViT) with its projector; for videos kimik25.py.

The published rotary embedding turns neighbouring values of a head, columns before rows; ours turns
halves, rows before columns: q and k are permuted once, at load, which no score can tell. Computes
what transformers.models.kimi_k25.modeling_kimi_k25.Kimi_K25VisionModel and its projection compute
for images, under the names of moonshotai/Kimi-VL-* and Kimi-K2.5. Knows nothing of graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from actors.models.layers.block import Affine, BlockWeights, Style, layer_norm
from actors.models.packed import Merger, bicubic_taps
from actors.models.packed_tower import Parts, Positions
from actors.models.packed_weights import (
    BlockNames,
    Dimensions,
    Expected,
    Weights,
    affine,
    expected_blocks,
)
from actors.spec.model_spec import ModelSpec

PREFIXES = ("vision_tower.", "multi_modal_projector.", "mm_projector.")

PROJECTORS = {"kimi_vl": ("linear_1", "linear_2"), "kimi_k25": ("proj.0", "proj.2")}
"""What each family calls the projector's layers."""

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

EPSILON = 1e-5
"""Of torch's LayerNorm, which the configuration says nothing about."""


def dimensions(spec: ModelSpec) -> Dimensions:
    """Raises CheckpointError for a key that is missing."""
    return Dimensions.read(
        spec,
        depth="num_hidden_layers",
        heads="num_attention_heads",
        merge_size="merge_kernel_size",
    )


def expected(spec: ModelSpec) -> Expected:
    """Name and shape of every tensor of the tower, without the checkpoint's prefixes."""
    tower = dimensions(spec)
    side = int(spec.vision["init_pos_emb_height"])
    up, down = PROJECTORS[spec.family]
    return {
        **affine("patch_embed.proj", (tower.width, 3, tower.patch_size, tower.patch_size)),
        **affine("patch_embed.pos_emb", (side, side, tower.width), bias=False),
        **expected_blocks(NAMES, tower.depth, tower.width, tower.mlp_width),
        **affine(LAST_NORM, (tower.width,)),
        **affine("pre_norm", (tower.width,)),
        **affine(up, (tower.merged, tower.merged)),
        **affine(down, (spec.width, tower.merged)),
    }


def parts(spec: ModelSpec, weights: Weights) -> Parts:
    """The tower's, from tensors as `expected` names them."""
    tower = dimensions(spec)
    final, merger = weights.affine(LAST_NORM), projector(spec, weights)

    def head(x: Tensor, tapped: Sequence[Tensor]) -> Tensor:
        return merger(layer_norm(x, final, EPSILON))

    table = weights.place(weights.tensors["patch_embed.pos_emb.weight"].flatten(0, 1))
    return Parts(
        embedding=weights.embedding("patch_embed.proj", spec.mean, spec.std),
        later=weights.later_embedding("patch_embed.proj", spec.std),
        layers=[permuted(layer, tower) for layer in weights.blocks(NAMES, tower.depth)],
        style=Style(tower.heads, "gelu_tanh", epsilon=EPSILON),
        head=head,
        positions=Positions(table, bicubic_taps, taps=16),
    )


def projector(spec: ModelSpec, weights: Weights) -> Merger:
    """What makes a token of the patches of a merge block."""
    up, down = PROJECTORS[spec.family]
    return Merger(
        norm=weights.affine("pre_norm"),
        up=weights.affine(up),
        down=weights.affine(down),
        epsilon=EPSILON,
    )


def permuted(layer: BlockWeights, tower: Dimensions) -> BlockWeights:
    """The layer with the values of each head of q and k in the order of our rotary embedding."""
    pairs = torch.arange(tower.head_size, device=layer.qkv.weight.device).view(-1, 2)
    columns, rows = pairs[0::2], pairs[1::2]
    order = torch.cat([rows, columns]).t().flatten()

    def heads(values: Tensor) -> Tensor:
        query, key, value = values.unflatten(0, (3, tower.heads, tower.head_size))
        return torch.stack([query[:, order], key[:, order], value]).flatten(0, 2)

    return replace(layer, qkv=Affine(heads(layer.qkv.weight), heads(layer.qkv.bias)))
