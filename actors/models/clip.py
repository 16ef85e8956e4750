"""The vision towers of SigLIP and of CLIP: by themselves, and with LLaVA's projector.

Computes what transformers.models.siglip, clip and llava compute in SiglipVisionModel (without its
pooling head), CLIPVisionModel and LlavaMultiModalProjector, under the checkpoint's own names.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.models.gemma3 import NAMES
from actors.models.layers.block import Activation, Style, layer_norm
from actors.models.packed_weights import Dimensions, Expected, Weights, affine, expected_blocks
from actors.models.tiled import TileParts, merge_order, tile_sizing
from actors.spec.model_spec import ModelSpec

PREFIXES = ("vision_model.",)
LLAVA_PREFIXES = tuple(
    model + part
    for model in ("", "model.")
    for part in ("vision_tower.vision_model.", "vision_tower.", "multi_modal_projector.")
)
"""As published, and as transformers saves them today."""

ACTIVATIONS: dict[str, Activation] = {
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "gelu": "gelu",
}
"""By `hidden_act`."""

PROJECTORS = {
    "llava": ("linear_1", "linear_2"),
    "llava_onevision": ("linear_1", "linear_2"),
    "llava_qwen": ("0", "2"),
}
"""What each family that has a projector calls its layers."""

CLASS = "embeddings.class_embedding"
LAST_NORM = "post_layernorm"


def dimensions(spec: ModelSpec) -> Dimensions:
    """Of the layers that are used. Raises CheckpointError for a key that is missing."""
    return Dimensions.read(spec, depth="used_layers", heads="num_attention_heads")


def expected(spec: ModelSpec) -> Expected:
    """Name and shape of every tensor that is used, without the checkpoint's prefixes."""
    tower, rows = dimensions(spec), tile_sizing(spec).side_patches ** 2
    patch = (3, tower.patch_size, tower.patch_size)
    clip = is_clip(spec)
    shapes = {
        **affine("embeddings.patch_embedding", (tower.width, *patch), bias=not clip),
        **affine("embeddings.position_embedding", (rows + clip, tower.width), bias=False),
        **expected_blocks(NAMES, tower.depth, tower.width, tower.mlp_width),
    }
    if clip:
        shapes |= {CLASS: (tower.width,), **affine("pre_layrnorm", (tower.width,))}
    if spec.family in PROJECTORS:
        (up, down), bias = PROJECTORS[spec.family], bool(spec.vision["projector_bias"])
        shapes |= affine(up, (spec.width, tower.width), bias=bias)
        shapes |= affine(down, (spec.width, spec.width), bias=bias)
    elif not clip:
        shapes |= affine(LAST_NORM, (tower.width,))
    return shapes


def unused(spec: ModelSpec) -> frozenset[str]:
    """What checkpoints have beside it: SigLIP's pooling, layers after the one that is taken."""
    tower, layers = dimensions(spec), int(spec.vision["num_hidden_layers"])
    later = expected_blocks(NAMES, layers, tower.width, tower.mlp_width).keys()
    attention = [f"attention.{part}" for part in ("in_proj_weight", "in_proj_bias")]
    pooling = ["attention.out_proj", "layernorm", "mlp.fc1", "mlp.fc2"]
    names = {*later, *affine(LAST_NORM, (1,)), "embeddings.position_ids"}
    names |= {f"head.{name}" for name in ("probe", *attention)}
    names |= {f"head.{name}.{part}" for name in pooling for part in ("weight", "bias")}
    return frozenset(names - expected(spec).keys())


def parts(spec: ModelSpec, weights: Weights) -> TileParts:
    """The tower's, from tensors as `expected` names them."""
    tower = dimensions(spec)
    epsilon = float(spec.vision["layer_norm_eps"])
    stem = None
    if is_clip(spec):
        before = weights.affine("pre_layrnorm")

        def stem(x: Tensor) -> Tensor:
            return layer_norm(x, before, epsilon)

    return TileParts(
        embedding=weights.embedding("embeddings.patch_embedding", spec.mean, spec.std).weight,
        start=weights.place(start(spec, weights)),
        layers=weights.blocks(NAMES, tower.depth),
        style=Style(tower.heads, ACTIVATIONS[spec.vision["hidden_act"]], epsilon),
        head=head(spec, weights, epsilon),
        stem=stem,
    )


def start(spec: ModelSpec, weights: Weights) -> Tensor:
    """See TileParts.start, in float32."""
    positions = weights.tensors["embeddings.position_embedding.weight"].float()
    precise = Weights(weights.tensors, positions.device, torch.float32)
    bias = precise.embedding("embeddings.patch_embedding", spec.mean, spec.std).bias
    if not is_clip(spec):
        return merge_order(positions, tile_sizing(spec)) + bias
    patches = merge_order(positions[1:], tile_sizing(spec)) + bias
    return torch.cat([positions[:1] + weights.tensors[CLASS].float(), patches])


def head(spec: ModelSpec, weights: Weights, epsilon: float) -> Callable[[Tensor], Tensor]:
    """What follows the last layer: LLaVA's projector, SigLIP's norm, of CLIP nothing."""
    if spec.family in PROJECTORS:
        first, second = (weights.affine(name) for name in PROJECTORS[spec.family])
        return lambda x: F.linear(
            F.gelu(F.linear(x, first.weight, first.bias)), second.weight, second.bias
        )
    if is_clip(spec):
        return lambda x: x
    last = weights.affine(LAST_NORM)
    return lambda x: layer_norm(x, last, epsilon)


def is_clip(spec: ModelSpec) -> bool:
    """A class token and a norm before the layers; otherwise it is SigLIP."""
    return bool(spec.vision["model_type"] == "clip_vision_model")
