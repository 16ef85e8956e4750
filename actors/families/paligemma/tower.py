"""The vision tower of PaliGemma: SigLIP, normed, projected by one linear layer.

Computes what transformers.models.paligemma computes in get_image_features. Like version 5.23,
does not divide by the square root of the language model's width; earlier versions did.
"""

from __future__ import annotations

from dataclasses import replace

from actors.families.clip import tower as clip
from actors.families.llava.tower import PREFIXES
from actors.models.layers.weights import Weights, affine
from actors.models.tiled import TileParts
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec

PROJECTOR = "linear"


def family(spec: ModelSpec) -> Family[TileParts]:
    siglip, width = clip.family(spec), clip.dimensions(spec).width
    expected = siglip.expected | affine(PROJECTOR, (spec.width, width))
    return replace(siglip, prefixes=PREFIXES, expected=expected, parts=parts)


def parts(spec: ModelSpec, weights: Weights) -> TileParts:
    siglip, projector = clip.parts(spec, weights), weights.affine(PROJECTOR)
    return replace(siglip, head=lambda x: projector.linear(siglip.head(x)))
