"""Voxtral's encoder and projector; transformers: VoxtralModel.get_audio_features."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from actors.families.whisper.tower import (
    AudioParts,
    AudioTower,
    audio,
    expected,
    last_norm,
    parts_with,
)
from actors.models.layers.weights import Dimensions, Weights, affine
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec

PREFIXES = ("audio_tower.", "multi_modal_projector.")


def family(spec: ModelSpec) -> Family[AudioParts]:
    tower = Dimensions.read(spec)
    shapes = expected(spec) | {
        **affine("linear_1", (spec.width, tower.width * audio(spec).stack), bias=False),
        **affine("linear_2", (spec.width, spec.width), bias=False),
    }
    return Family(PREFIXES, shapes, tower.head_size, parts, AudioTower)


def parts(spec: ModelSpec, weights: Weights) -> AudioParts:
    norm, stack = last_norm(weights), audio(spec).stack
    up, down = weights.affine("linear_1"), weights.affine("linear_2")

    def head(x: Tensor) -> Tensor:
        return down.linear(F.gelu(up.linear(norm(x).unflatten(0, (-1, stack)).flatten(1))))

    return parts_with(spec, weights, head)
