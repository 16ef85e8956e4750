"""The vision tower of Llama 4, Scout and Maverick, up to the width of the language model.

Computes what transformers.models.llama4.modeling_llama4 computes in Llama4VisionModel and
Llama4MultiModalProjector, under the checkpoint's own names. Knows nothing of graphs, budgets or
where weights come from.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.models import packed
from actors.models.layers.block import Affine, BlockWeights, Style, layer_norm
from actors.models.llama4_config import QKV, Architecture
from actors.models.packed_weights import Weights, halves
from actors.models.tiled import TileParts, merge_order, tile_sizing
from actors.spec.model_spec import ModelSpec

EPSILON = 1e-5
"""torch.nn.LayerNorm's own: transformers does not read `norm_eps`."""


def parts(spec: ModelSpec, weights: Weights) -> TileParts:
    """The tower's, from tensors as llama4_config.expected names them."""
    arch, sizing = Architecture.of(spec), tile_sizing(spec)
    tensors = weights.tensors
    linear = tensors["patch_embedding.linear.weight"]
    embedding = packed.folded_embedding(
        linear.view(-1, 3, 1, sizing.patch_size, sizing.patch_size),
        torch.zeros(arch.width, device=linear.device),
        spec.mean,
        spec.std,
    )
    positions = tensors["positional_embedding_vlm"].float()
    start = torch.cat(
        [
            positions[-1:] + tensors["class_embedding"].float(),
            merge_order(positions[:-1], sizing) + embedding.bias,
        ]
    )
    before, after = weights.affine("layernorm_pre"), weights.affine("layernorm_post")
    up, down, projector = (
        weights.place(tensors[f"{name}.weight"])
        for name in ("vision_adapter.mlp.fc1", "vision_adapter.mlp.fc2", "linear_1")
    )

    def head(x: Tensor) -> Tensor:
        x = layer_norm(x.view(-1, arch.width), after, EPSILON).view(x.shape)
        return F.linear(F.gelu(F.linear(F.gelu(F.linear(x, up)), down)), projector)

    cos, sin = rotary(sizing.side_patches, sizing.merge_size, arch)
    return TileParts(
        embedding=weights.place(embedding.weight),
        start=weights.place(start),
        layers=[layer(weights, arch, f"model.layers.{index}") for index in range(arch.depth)],
        style=Style(arch.heads, "gelu", EPSILON),
        head=head,
        stem=lambda x: layer_norm(x, before, EPSILON),
        rotary=(cos.to(weights.device), sin.to(weights.device)),
    )


def rotary(side: int, merge: int, arch: Architecture) -> tuple[Tensor, Tensor]:
    """See TileParts.rotary: columns before rows, both from 1; the class token is not rotated."""
    places = packed.places(side, side, merge).flip(1) + 1
    cos, sin = packed.rotary_tables(side + 1, arch.width // arch.heads, arch.theta)
    half = cos.shape[1] * 2
    return (
        torch.cat([torch.ones(1, half), cos[places].flatten(1)]),
        torch.cat([torch.zeros(1, half), sin[places].flatten(1)]),
    )


def layer(weights: Weights, arch: Architecture, block: str) -> BlockWeights:
    """One layer."""
    query, key, value = (weights.affine(f"{block}.{name}") for name in QKV)
    query, key = halves(query, arch.heads), halves(key, arch.heads)
    return BlockWeights(
        norm1=weights.affine(f"{block}.input_layernorm"),
        qkv=Affine(
            torch.cat([query.weight, key.weight, value.weight]),
            torch.cat([query.bias, key.bias, value.bias]),
        ),
        proj=weights.affine(f"{block}.self_attn.o_proj"),
        norm2=weights.affine(f"{block}.post_attention_layernorm"),
        up=weights.affine(f"{block}.mlp.fc1"),
        down=weights.affine(f"{block}.mlp.fc2"),
    )
