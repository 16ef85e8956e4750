"""Qwen2.5-Omni: transformers.models.qwen2_5_omni.

Its audio tower is Whisper's encoder over windows of two seconds, its vision tower Qwen2.5-VL's.
"""

from __future__ import annotations

from dataclasses import replace

from actors.families.qwen2_vl.spec import TOWER_25, in_windows
from actors.families.whisper.spec import SILENCE, feature_extractor, log_mel_sizes, usual
from actors.spec.audio import STRIDE, WhisperSizing
from actors.spec.checkpoint import Json
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import ModelSource, chosen_tower

ENCODER: Json = {
    **{"d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20},
    **{"encoder_ffn_dim": 5120, "num_mel_bins": 128, "n_window": 100, "output_dim": 3584},
}
"""transformers' defaults for keys that `audio_config` lacks."""
POOLED = 2  # positions that are averaged


def qwen25_omni(source: ModelSource) -> ModelSpec:
    return chosen_tower(source, omni_vision, omni_audio)


def omni_vision(source: ModelSource) -> ModelSpec:
    """Takes images only, because the model may also hear the sound of videos."""
    return replace(in_windows(source), family="qwen2_5_omni")


def omni_audio(source: ModelSource) -> ModelSpec:
    """Sounds are at most as long as the feature extractor's `chunk_length`: it drops the rest."""
    encoder = usual(ENCODER | (source.config.get("audio_config") or {}))
    extractor = feature_extractor(source, encoder)
    frames = 2 * int(encoder["n_window"])
    if frames % (STRIDE * POOLED):
        raise ValueError("n_window of the audio encoder: a token would be of two windows")
    sizing = WhisperSizing(
        *log_mel_sizes(extractor, encoder),
        window_frames=frames,
        stack=POOLED,
        most_seconds=float(extractor["chunk_length"]),
        whole=False,
        ends=True,
    )
    return source.spec("qwen2_5_omni", SILENCE, encoder, sizing, encoder["output_dim"])


MODEL_TYPES = {"qwen2_5_omni": qwen25_omni}
VISION_DEFAULTS = {"qwen2_5_omni": TOWER_25}
