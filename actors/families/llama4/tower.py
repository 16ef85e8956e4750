"""The vision tower of Llama 4, Scout and Maverick, with its projector.

Computes what transformers.models.llama4 computes in Llama4VisionModel and
Llama4MultiModalProjector.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.models.layers.block import Style, layer_norm
from actors.models.layers.patches import places, rotary_tables
from actors.models.layers.weights import (
    BlockNames,
    Dimensions,
    Weights,
    affine,
    expected_blocks,
    neighbours_to_halves,
    reordered,
    table_side,
)
from actors.models.tiled import TileParts, TileTower, merge_order
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import rope_theta

PREFIXES = ("vision_model.", "multi_modal_projector.")

NAMES = BlockNames(
    block="model.layers",
    norm1="input_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    proj="self_attn.o_proj",
    norm2="post_attention_layernorm",
    up=("mlp.fc1",),
    down="mlp.fc2",
)

EPSILON = 1e-5  # torch's default for LayerNorm: transformers does not read `norm_eps`


def family(spec: ModelSpec) -> Family[TileParts]:
    tower = Dimensions.read(spec)
    adapter = int(spec.vision["vision_output_dim"])
    expected = {
        "class_embedding": (tower.width,),
        "positional_embedding_vlm": (table_side(spec) ** 2 + 1, tower.width),
        "patch_embedding.linear.weight": (tower.width, 3 * tower.patch_size**2),
        "vision_adapter.mlp.fc1.weight": (adapter, tower.merged),
        "vision_adapter.mlp.fc2.weight": (adapter, adapter),
        "linear_1.weight": (spec.width, adapter),
        **affine("layernorm_pre", (tower.width,)),
        **affine("layernorm_post", (tower.width,)),
        **expected_blocks(NAMES, tower.depth, tower.width, tower.mlp_width),
    }
    return Family(PREFIXES, expected, tower.rotary_head_size, parts, TileTower)


def parts(spec: ModelSpec, weights: Weights) -> TileParts:
    tower, tensors = Dimensions.read(spec), weights.tensors
    positions = tensors["positional_embedding_vlm"].float()
    classes = positions[-1:] + tensors["class_embedding"].float()
    patches = merge_order(positions[:-1], tower.merge_size)
    before, after = weights.affine("layernorm_pre"), weights.affine("layernorm_post")
    up, down, projector = (
        weights.place(tensors[f"{name}.weight"])
        for name in ("vision_adapter.mlp.fc1", "vision_adapter.mlp.fc2", "linear_1")
    )

    def head(x: Tensor) -> Tensor:
        x = layer_norm(x.view(-1, tower.width), after, EPSILON).view(x.shape)
        return F.linear(F.gelu(F.linear(F.gelu(F.linear(x, up)), down)), projector)

    order = neighbours_to_halves(tower.head_size)
    cos, sin = rotary(table_side(spec), tower, rope_theta(spec.vision))
    return TileParts(
        embedding=weights.embedding("patch_embedding.linear", spec).weight,
        start=weights.start("patch_embedding.linear", spec, patches, classes),
        layers=[
            reordered(layer, tower.heads, order) for layer in weights.blocks(NAMES, tower.depth)
        ],
        style=Style(tower.heads, "gelu", EPSILON),
        head=head,
        stem=lambda x: layer_norm(x, before, EPSILON),
        rotary=(cos.to(weights.device), sin.to(weights.device)),
    )


def rotary(side: int, tower: Dimensions, theta: float) -> tuple[Tensor, Tensor]:
    """See TileParts.rotary. Columns before rows, both from 1; the class token is not rotated."""
    on_grid = places(side, side, tower.merge_size).flip(1) + 1
    cos, sin = rotary_tables(side + 1, tower.head_size, theta)
    half = cos.shape[1] * 2
    return (
        torch.cat([torch.ones(1, half), cos[on_grid].flatten(1)]),
        torch.cat([torch.zeros(1, half), sin[on_grid].flatten(1)]),
    )
