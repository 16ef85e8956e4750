"""The vision tower of Idefics3 and SmolVLM: SigLIP, normed, pixel shuffle, one linear layer.

Computes what transformers.models.idefics3 computes in get_image_features.
"""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F

from actors.families.clip import tower as clip
from actors.models.layers.weights import Weights, affine
from actors.models.tiled import TileParts
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec

PREFIXES = ("vision_model.", "connector.modality_projection.")

PROJECTOR = "proj"


def family(spec: ModelSpec) -> Family[TileParts]:
    siglip, merged = clip.family(spec), clip.dimensions(spec).merged
    expected = siglip.expected | affine(PROJECTOR, (spec.width, merged), bias=False)
    return replace(siglip, prefixes=PREFIXES, expected=expected, parts=parts)


def parts(spec: ModelSpec, weights: Weights) -> TileParts:
    siglip, tower = clip.parts(spec, weights), clip.dimensions(spec)
    projector = weights.affine(PROJECTOR).weight
    return replace(
        siglip,
        head=lambda x: F.linear(siglip.head(x.view(-1, tower.width)).view(x.shape), projector),
    )
