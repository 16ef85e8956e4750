"""Qwen2-Audio's encoder, pooling and projector; transformers: Qwen2AudioModel."""

from __future__ import annotations

from torch import Tensor

from actors.families.qwen2_audio.spec import POOLED
from actors.families.whisper.tower import (
    AudioParts,
    AudioTower,
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
    shapes = expected(spec) | affine("linear", (spec.width, tower.width))
    return Family(PREFIXES, shapes, tower.head_size, parts, AudioTower)


def parts(spec: ModelSpec, weights: Weights) -> AudioParts:
    norm, projector = last_norm(weights), weights.affine("linear")

    def head(x: Tensor) -> Tensor:
        return projector.linear(norm(x.unflatten(0, (-1, POOLED)).mean(1)))

    return parts_with(spec, weights, head)
