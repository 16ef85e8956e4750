"""The vision tower of Aya Vision and Cohere 2 Vision: SigLIP, pixel shuffle, SwiGLU.

Computes what transformers.models.aya_vision and cohere2_vision compute in get_image_features. Aya
Vision norms the patches of a token together, Cohere 2 Vision each patch by SigLIP's last norm.
"""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from actors.families.clip import tower as clip
from actors.families.llava.tower import PREFIXES
from actors.models.layers.block import layer_norm
from actors.models.layers.weights import Weights, affine
from actors.models.tiled import TileParts
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec


def family(spec: ModelSpec) -> Family[TileParts]:
    siglip, tower = clip.family(spec), clip.dimensions(spec)
    inner = int(spec.vision["projector_width"])
    name, size = last_norm(spec)
    expected = {
        **clip.layer_shapes(spec),
        **affine(name, (size,)),
        **affine("linear_1", (inner, tower.merged)),
        **affine("linear_2", (spec.width, inner // 2)),
    }
    return replace(siglip, prefixes=PREFIXES, expected=expected, parts=parts)


def last_norm(spec: ModelSpec) -> tuple[str, int]:
    """The name of the last norm, and over how many values it is."""
    tower = clip.dimensions(spec)
    if spec.family == "aya_vision":
        return "layernorm", tower.merged
    return clip.LAST_NORM, tower.width


def parts(spec: ModelSpec, weights: Weights) -> TileParts:
    name, size = last_norm(spec)
    norm, up, down = (weights.affine(each) for each in (name, "linear_1", "linear_2"))
    epsilon = float(spec.vision.get("projector_epsilon", spec.vision["layer_norm_eps"]))

    def head(x: Tensor) -> Tensor:
        normed = layer_norm(x.view(-1, size), norm, epsilon).view(x.shape)
        shown, gate = up.linear(normed).chunk(2, -1)
        return down.linear(F.silu(gate) * shown)

    return clip.parts(spec, weights, head)
