"""The vision tower of Gemma 3: SigLIP, pooled to 256 tokens, normed, projected.

Computes what transformers.models.gemma3 computes in Gemma3MultiModalProjector over SigLIP.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from actors.families.clip.tower import LAST_NORM, NAMES, PATCHES, start, tower_shapes
from actors.models.layers.block import Style, layer_norm
from actors.models.layers.weights import LAYERS, Dimensions, Expected, Weights, affine
from actors.models.tiled import TileParts, TileTower, tile_sizing
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec

PREFIXES = tuple(
    model + part
    for model in ("", "model.")
    for part in ("vision_tower.vision_model.", "vision_tower.", "multi_modal_projector.")
)


def family(spec: ModelSpec) -> Family[TileParts]:
    return Family(PREFIXES, expected, dimensions, parts, TileTower)


def dimensions(spec: ModelSpec) -> Dimensions:
    return Dimensions.read(spec, **LAYERS)


def expected(spec: ModelSpec) -> Expected:
    tower = dimensions(spec)
    return {
        **tower_shapes(tower, tile_sizing(spec).side_patches ** 2),
        **affine(LAST_NORM, (tower.width,)),
        **affine("mm_soft_emb_norm", (tower.width,), bias=False),
        "mm_input_projection_weight": (tower.width, spec.width),
    }


def parts(spec: ModelSpec, weights: Weights) -> TileParts:
    tower = dimensions(spec)
    epsilon = float(spec.vision.get("layer_norm_eps", 1e-6))
    last = weights.affine(LAST_NORM)
    # The norm's weight is stored less one.
    norm = weights.place(weights.tensors["mm_soft_emb_norm.weight"].float() + 1)
    projection = weights.place(weights.tensors["mm_input_projection_weight"].T)

    def head(x: Tensor) -> Tensor:
        x = layer_norm(x.view(-1, tower.merge_size**2, tower.width), last, epsilon)
        return F.linear(F.rms_norm(x.mean(1), norm.shape, norm, epsilon), projection)

    return TileParts(
        embedding=weights.embedding(PATCHES, spec.mean, spec.std).weight,
        start=weights.place(start(spec, weights)),
        layers=weights.blocks(NAMES, tower.depth),
        style=Style(tower.heads, "gelu_tanh", epsilon),
        head=head,
    )
