"""The vision tower of LLaVA: CLIP's or SigLIP's, with a projector.

The projector computes what transformers.models.llava computes in LlavaMultiModalProjector.
"""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F

from actors.families.clip import tower as clip
from actors.models.layers.weights import Expected, Weights, affine
from actors.models.tiled import TileParts, TileTower
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec

PREFIXES = ("vision_tower.vision_model.", "vision_tower.", "multi_modal_projector.")

PROJECTOR = ("linear_1", "linear_2")


def family(spec: ModelSpec) -> Family[TileParts]:
    unused, head_size = clip.unused(spec), clip.dimensions(spec).head_size
    return Family(PREFIXES, expected(spec), head_size, parts, TileTower, unused)


def expected(spec: ModelSpec, projector: tuple[str, str] = PROJECTOR) -> Expected:
    (up, down), bias = projector, bool(spec.vision["projector_bias"])
    seen = clip.dimensions(spec).width * (1 + len(spec.vision.get("taps", ())))
    return {
        **clip.layer_shapes(spec),
        **affine(up, (spec.width, seen), bias=bias),
        **affine(down, (spec.width, spec.width), bias=bias),
    }


def parts(spec: ModelSpec, weights: Weights, projector: tuple[str, str] = PROJECTOR) -> TileParts:
    up, down = (weights.affine(name) for name in projector)
    taps = [layer - 1 for layer in spec.vision.get("taps", ())]
    return replace(
        clip.parts(spec, weights, lambda x: down.linear(F.gelu(up.linear(x)))), taps=taps
    )
