"""Qwen2-Audio: Whisper's encoder, whose rows end with the sound; transformers: Qwen2AudioModel."""

from __future__ import annotations

from actors.families.whisper.spec import over_whisper
from actors.spec.checkpoint import Json
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import ModelSource

ENCODER: Json = {
    **{"d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20},
    **{"encoder_ffn_dim": 5120, "num_mel_bins": 128, "max_source_positions": 1500},
}
"""transformers' defaults for keys that `audio_config` lacks."""
TEXT_WIDTH = 4096  # if `text_config` does not say
POOLED = 2  # positions that are averaged


def qwen2_audio(source: ModelSource) -> ModelSpec:
    encoder = ENCODER | (source.config.get("audio_config") or {})
    width = (source.config.get("text_config") or {}).get("hidden_size", TEXT_WIDTH)
    return over_whisper("qwen2_audio", source, encoder, width, POOLED, whole=False)


MODEL_TYPES = {"qwen2_audio": qwen2_audio}
