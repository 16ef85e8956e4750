"""The vision tower of Gemma 3: SigLIP, pooled to 256 tokens, normed, projected.

Computes what transformers.models.siglip and transformers.models.gemma3.modeling_gemma3 compute in
SiglipVisionModel and Gemma3MultiModalProjector, under the checkpoint's own names.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.models.layers.block import Style, layer_norm
from actors.models.packed_weights import (
    BlockNames,
    Dimensions,
    Expected,
    Weights,
    affine,
    expected_blocks,
)
from actors.models.tiled import TileParts, merge_order, tile_sizing
from actors.spec.model_spec import ModelSpec

PREFIXES = tuple(
    model + part
    for model in ("", "model.")
    for part in ("vision_tower.vision_model.", "vision_tower.", "multi_modal_projector.")
)

NAMES = BlockNames(
    block="encoder.layers",
    norm1="layer_norm1",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    proj="self_attn.out_proj",
    norm2="layer_norm2",
    up=("mlp.fc1",),
    down="mlp.fc2",
)


def dimensions(spec: ModelSpec) -> Dimensions:
    """Raises CheckpointError for a key that is missing."""
    return Dimensions.read(spec, depth="num_hidden_layers", heads="num_attention_heads")


def expected(spec: ModelSpec) -> Expected:
    """Name and shape of every tensor of the tower, without the checkpoint's prefixes."""
    tower, side = dimensions(spec), tile_sizing(spec).side_patches
    patch = (3, tower.patch_size, tower.patch_size)
    return {
        **affine("embeddings.patch_embedding", (tower.width, *patch)),
        **affine("embeddings.position_embedding", (side**2, tower.width), bias=False),
        **expected_blocks(NAMES, tower.depth, tower.width, tower.mlp_width),
        **affine("post_layernorm", (tower.width,)),
        **affine("mm_soft_emb_norm", (tower.width,), bias=False),
        "mm_input_projection_weight": (tower.width, spec.width),
    }


def parts(spec: ModelSpec, weights: Weights) -> TileParts:
    """The tower's, from tensors as `expected` names them."""
    tower, sizing = dimensions(spec), tile_sizing(spec)
    epsilon = float(spec.vision.get("layer_norm_eps", 1e-6))
    embedding = weights.embedding("embeddings.patch_embedding", spec.mean, spec.std)
    positions = weights.tensors["embeddings.position_embedding.weight"].float()
    precise = Weights(weights.tensors, positions.device, torch.float32)
    bias = precise.embedding("embeddings.patch_embedding", spec.mean, spec.std).bias
    last = weights.affine("post_layernorm")
    # The norm's weight is stored less one.
    norm = weights.place(weights.tensors["mm_soft_emb_norm.weight"].float() + 1)
    projection = weights.place(weights.tensors["mm_input_projection_weight"].T)

    def head(x: Tensor) -> Tensor:
        x = layer_norm(x.view(-1, tower.merge_size**2, tower.width), last, epsilon)
        return F.linear(F.rms_norm(x.mean(1), norm.shape, norm, epsilon), projection)

    return TileParts(
        embedding=embedding.weight,
        start=weights.place(merge_order(positions, sizing) + bias),
        layers=weights.blocks(NAMES, tower.depth),
        style=Style(tower.heads, "gelu_tanh", epsilon),
        head=head,
    )
