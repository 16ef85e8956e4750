"""The vision tower of Llama 4, Scout and Maverick, with its projector.

Computes what transformers.models.llama4 computes in Llama4VisionModel and
Llama4MultiModalProjector.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.models.layers.block import Affine, BlockWeights, Style, layer_norm
from actors.models.layers.patches import folded_embedding, places, rotary_tables
from actors.models.layers.weights import Expected, Weights, affine, halves, stated
from actors.models.tiled import TileParts, TileTower, merge_order, tile_sizing
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec

PREFIXES = ("vision_model.", "multi_modal_projector.")

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")

EPSILON = 1e-5  # torch's default for LayerNorm: transformers does not read `norm_eps`


def family(spec: ModelSpec) -> Family[TileParts]:
    return Family(PREFIXES, expected, Llama4Sizes.of, parts, TileTower)


@dataclass(frozen=True, slots=True)
class Llama4Sizes:
    depth: int
    width: int
    mlp_width: int
    heads: int
    adapter_width: int
    theta: float

    @classmethod
    def of(cls, spec: ModelSpec) -> Llama4Sizes:
        vision = spec.vision
        rotary = vision.get("rope_parameters") or vision
        with stated(spec):
            widths = {
                int(vision[key])
                for key in ("projector_input_dim", "projector_output_dim", "vision_output_dim")
            }
            if len(widths) != 1:
                raise ValueError(f"projector_input_dim, {widths}: one width is supported")
            return cls(
                depth=int(vision["num_hidden_layers"]),
                width=int(vision["hidden_size"]),
                mlp_width=int(vision["intermediate_size"]),
                heads=int(vision["num_attention_heads"]),
                adapter_width=widths.pop(),
                theta=float(rotary.get("rope_theta", 10000)),
            )

    @property
    def head_size(self) -> int:
        return self.width // self.heads


def expected(spec: ModelSpec) -> Expected:
    sizes, sizing = Llama4Sizes.of(spec), tile_sizing(spec)
    width, adapter = sizes.width, sizes.adapter_width
    shapes: Expected = {
        "class_embedding": (width,),
        "positional_embedding_vlm": (sizing.side_patches**2 + 1, width),
        "patch_embedding.linear.weight": (width, 3 * sizing.patch_size**2),
        "vision_adapter.mlp.fc1.weight": (adapter, width * sizing.merge_size**2),
        "vision_adapter.mlp.fc2.weight": (adapter, adapter),
        "linear_1.weight": (spec.width, adapter),
        **affine("layernorm_pre", (width,)),
        **affine("layernorm_post", (width,)),
    }
    for layer in range(sizes.depth):
        block = f"model.layers.{layer}"
        shapes |= affine(f"{block}.input_layernorm", (width,))
        shapes |= affine(f"{block}.post_attention_layernorm", (width,))
        for name in (*QKV, "self_attn.o_proj"):
            shapes |= affine(f"{block}.{name}", (width, width))
        shapes |= affine(f"{block}.mlp.fc1", (sizes.mlp_width, width))
        shapes |= affine(f"{block}.mlp.fc2", (width, sizes.mlp_width))
    return shapes


def parts(spec: ModelSpec, weights: Weights) -> TileParts:
    sizes, sizing = Llama4Sizes.of(spec), tile_sizing(spec)
    tensors = weights.tensors
    linear = tensors["patch_embedding.linear.weight"]
    embedding = folded_embedding(
        linear.view(-1, 3, 1, sizing.patch_size, sizing.patch_size),
        torch.zeros(sizes.width, device=linear.device),
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
        x = layer_norm(x.view(-1, sizes.width), after, EPSILON).view(x.shape)
        return F.linear(F.gelu(F.linear(F.gelu(F.linear(x, up)), down)), projector)

    cos, sin = rotary(sizing.side_patches, sizing.merge_size, sizes)
    return TileParts(
        embedding=weights.place(embedding.weight),
        start=weights.place(start),
        layers=[layer(weights, sizes, f"model.layers.{index}") for index in range(sizes.depth)],
        style=Style(sizes.heads, "gelu", EPSILON),
        head=head,
        stem=lambda x: layer_norm(x, before, EPSILON),
        rotary=(cos.to(weights.device), sin.to(weights.device)),
    )


def rotary(side: int, merge: int, sizes: Llama4Sizes) -> tuple[Tensor, Tensor]:
    """See TileParts.rotary. Columns before rows, both from 1; the class token is not rotated."""
    on_grid = places(side, side, merge).flip(1) + 1
    cos, sin = rotary_tables(side + 1, sizes.width // sizes.heads, sizes.theta)
    half = cos.shape[1] * 2
    return (
        torch.cat([torch.ones(1, half), cos[on_grid].flatten(1)]),
        torch.cat([torch.zeros(1, half), sin[on_grid].flatten(1)]),
    )


def layer(weights: Weights, sizes: Llama4Sizes, block: str) -> BlockWeights:
    query, key, value = (weights.affine(f"{block}.{name}") for name in QKV)
    query, key = halves(query, sizes.heads), halves(key, sizes.heads)
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
