"""Voxtral, Whisper's encoder over windows of half a minute: transformers.models.voxtral."""

from __future__ import annotations

from actors.families.whisper.spec import over_whisper
from actors.spec.checkpoint import Json
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import ModelSource, only

ENCODER: Json = {
    **{"hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 20},
    **{"intermediate_size": 5120, "num_mel_bins": 128, "max_source_positions": 1500},
}
TEXT_WIDTH = 3072
"""transformers' defaults for keys that `audio_config` and `text_config` lack."""


def voxtral(source: ModelSource) -> ModelSpec:
    only(source.config, {"projector_hidden_act": "gelu"}, "config.json")
    encoder = ENCODER | (source.config.get("audio_config") or {})
    width = (source.config.get("text_config") or {}).get("hidden_size", TEXT_WIDTH)
    stack, rest = divmod(int(encoder["intermediate_size"]), int(encoder["hidden_size"]))
    if rest:
        raise ValueError("intermediate_size of audio_config: not a multiple of its hidden_size")
    return over_whisper("voxtral", source, encoder, width, stack, whole=True, several=True)


MODEL_TYPES = {"voxtral": voxtral}

REFUSED = {"voxtral_realtime": "its encoder is causal and hears a stream"}
