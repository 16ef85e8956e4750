"""The vision tower of LFM2-VL: SigLIP 2 with NaFlex, 2 x 2 patches projected to a token.

Computes what transformers.models.lfm2_vl computes in get_image_features: for each image the rows of
its tiles, then those of the whole image.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from actors.families.clip import tower as clip
from actors.families.llava.tower import PREFIXES, PROJECTOR
from actors.families.siglip2 import tower as siglip2
from actors.models.layers.patches import Merger
from actors.models.layers.weights import Weights, affine
from actors.models.packed import PackedParts, SlicedTower
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec

NORM, EPSILON = "layer_norm", 1e-5  # torch's default for LayerNorm: the configuration does not say


def family(spec: ModelSpec) -> Family[PackedParts]:
    tower, (up, down) = clip.dimensions(spec), PROJECTOR
    inner, bias = int(spec.vision["projector_width"]), bool(spec.vision["projector_bias"])
    expected = {
        **siglip2.tower_shapes(spec),
        **affine(up, (inner, tower.merged), bias=bias),
        **affine(down, (spec.width, inner), bias=bias),
    }
    if spec.vision["projector_norm"]:
        expected |= affine(NORM, (tower.merged,))
    return Family(PREFIXES, expected, tower.head_size, parts, SlicedTower, clip.POOLING)


def parts(spec: ModelSpec, weights: Weights) -> PackedParts:
    tower, projector = siglip2.parts(spec, weights), projector_of(spec, weights)
    return replace(tower, head=lambda x, tapped: projector(tower.head(x, tapped)))


def projector_of(spec: ModelSpec, weights: Weights) -> Callable[[Tensor], Tensor]:
    """[patches, width] to [tokens, width of a row]."""
    up, down = (weights.affine(name) for name in PROJECTOR)
    if spec.vision["projector_norm"]:
        return Merger(weights.affine(NORM), up, down, epsilon=EPSILON)
    merged = clip.dimensions(spec).merged
    return lambda x: down.linear(F.gelu(up.linear(x.view(-1, merged))))
