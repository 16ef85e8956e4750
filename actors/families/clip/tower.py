"""The vision towers of CLIP and SigLIP, on which many families build.

Computes what transformers.models.siglip and clip compute in SiglipVisionModel (without its pooling
head) and CLIPVisionModel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from actors.families.clip.spec import CLIP_TOWER
from actors.models.layers.block import Activation, Style, layer_norm
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

PREFIXES = ("vision_model.",)

NAMES = BlockNames(
    block="encoder.layers",
    norm1="layer_norm1",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    proj="self_attn.out_proj",
    norm2="layer_norm2",
    up=("mlp.fc1",),
    down="mlp.fc2",
)

ACTIVATIONS: Mapping[str, Activation] = {
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "gelu": "gelu",
}
"""By `hidden_act`."""

PATCHES = "embeddings.patch_embedding"
POSITIONS = "embeddings.position_embedding"
CLASS = "embeddings.class_embedding"
LAST_NORM = "post_layernorm"

POOLING = frozenset(
    {
        *("head.probe", "head.attention.in_proj_weight", "head.attention.in_proj_bias"),
        *(
            f"head.{name}.{part}"
            for name in ("attention.out_proj", "layernorm", "mlp.fc1", "mlp.fc2")
            for part in ("weight", "bias")
        ),
    }
)
"""SigLIP's pooling head, which is not used."""


def family(spec: ModelSpec) -> Family[TileParts]:
    tower = dimensions(spec)
    last = {} if is_clip(spec) else affine(LAST_NORM, (tower.width,))
    expected = layer_shapes(spec) | last
    return Family(PREFIXES, expected, tower.head_size, parts, TileTower, unused(spec))


def dimensions(spec: ModelSpec) -> Dimensions:
    """`depth` counts only the layers that are used."""
    if (found := spec.vision["hidden_act"]) not in ACTIVATIONS:
        raise ValueError(f"hidden_act {found!r}: supported are {', '.join(ACTIVATIONS)}")
    return Dimensions.read(spec, depth="used_layers")


def layer_shapes(spec: ModelSpec) -> Expected:
    """Everything up to the end of the last layer that is used."""
    return tower_shapes(spec, dimensions(spec), clip=is_clip(spec))


def tower_shapes(spec: ModelSpec, tower: Dimensions, *, clip: bool = False) -> Expected:
    patch = (3, tower.patch_size, tower.patch_size)
    shapes = {
        **affine(PATCHES, (tower.width, *patch), bias=not clip),
        **affine(POSITIONS, (table_side(spec) ** 2 + clip, tower.width), bias=False),
        **expected_blocks(NAMES, tower.depth, tower.width, tower.mlp_width),
    }
    if clip:
        shapes |= {CLASS: (tower.width,), **affine("pre_layrnorm", (tower.width,))}
    return shapes


def unused(spec: ModelSpec) -> frozenset[str]:
    """SigLIP's pooling, layers after the last that is used, and what follows them."""
    tower, layers = dimensions(spec), int(spec.vision["num_hidden_layers"])
    later = expected_blocks(NAMES, layers, tower.width, tower.mlp_width).keys()
    return POOLING | {*later, *affine(LAST_NORM, (1,)), "embeddings.position_ids"}


def parts(
    spec: ModelSpec, weights: Weights, head: Callable[[Tensor], Tensor] | None = None
) -> TileParts:
    """`head`: what follows the last layer. Default: a norm for SigLIP, nothing for CLIP."""
    tower = dimensions(spec)
    epsilon = float(spec.vision["layer_norm_eps"])
    clip = is_clip(spec)
    stem = None
    if clip:
        before = weights.affine("pre_layrnorm")

        def stem(x: Tensor) -> Tensor:
            return layer_norm(x, before, epsilon)

    if head is None and not clip:
        last = weights.affine(LAST_NORM)

        def head(x: Tensor) -> Tensor:
            return layer_norm(x, last, epsilon)

    positions, classes = weights.tensors[f"{POSITIONS}.weight"].float(), None
    if clip:
        classes, positions = positions[:1] + weights.tensors[CLASS].float(), positions[1:]
    return TileParts(
        embedding=weights.embedding(PATCHES, spec).weight,
        start=weights.start(PATCHES, spec, merge_order(positions, tower.merge_size), classes),
        layers=weights.blocks(NAMES, tower.depth),
        style=Style(tower.heads, ACTIVATIONS[spec.vision["hidden_act"]], epsilon),
        head=head or (lambda x: x),
        stem=stem,
    )


def is_clip(spec: ModelSpec) -> bool:
    """CLIP has a class token and a norm before the layers; otherwise it is SigLIP."""
    return bool(spec.vision["model_type"] == CLIP_TOWER)
