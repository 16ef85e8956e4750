"""Qwen2.5-Omni's audio encoder, pooling and projector; transformers: Qwen2_5OmniAudioEncoder."""

from __future__ import annotations

from torch import Tensor

from actors.families.qwen2_5_omni.spec import POOLED
from actors.families.whisper.tower import (
    AudioParts,
    AudioTower,
    audio,
    expected_layers,
    last_norm,
    parts_with,
    sinusoids,
)
from actors.models.layers.weights import Dimensions, Weights, affine
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec

PREFIXES = ("thinker.audio_tower.",)
UNUSED = frozenset({"audio_bos_eos_token.weight", "positional_embedding.positional_embedding"})


def family(spec: ModelSpec) -> Family[AudioParts]:
    tower = Dimensions.read(spec)
    shapes = {
        **expected_layers(spec),
        **affine("ln_post", (tower.width,)),
        **affine("proj", (spec.width, tower.width)),
    }
    return Family(PREFIXES, shapes, tower.head_size, parts, AudioTower, unused=UNUSED)


def parts(spec: ModelSpec, weights: Weights) -> AudioParts:
    norm, projector = last_norm(weights, "ln_post"), weights.affine("proj")

    def head(x: Tensor) -> Tensor:
        return projector.linear(norm(x.unflatten(0, (-1, POOLED)).mean(1)))

    width, sizing = Dimensions.read(spec).width, audio(spec)
    positions = sinusoids(sizing.window_tokens * sizing.stack, width)
    return parts_with(spec, weights, head, positions)
