"""Qwen3-Omni and Qwen3-ASR: transformers.models.qwen3_omni_moe, qwen3_asr.

Qwen3-Omni's vision tower is Qwen3-VL's.
"""

from __future__ import annotations

import math
from dataclasses import replace

from actors.families.qwen2_vl.spec import PIXELS
from actors.families.qwen3_vl.spec import TOWER, with_deepstack
from actors.families.whisper.spec import SILENCE, feature_extractor, log_mel_sizes, usual
from actors.spec.audio import ChunkSizing
from actors.spec.checkpoint import Json
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import CLIP_PIXELS, ModelSource, chosen_tower, only

WINDOW = 50
"""Half the frames of a window. transformers counts tokens as if there were no other value."""
LEAST_SAMPLES = 8000  # Qwen3-ASR, if the feature extractor does not say

SHARED: Json = {
    **{"num_mel_bins": 128, "n_window": WINDOW, "n_window_infer": 800},
    **{"output_dim": 3584, "downsample_hidden_size": 480},
}
OMNI: Json = SHARED | {
    **{"d_model": 1280, "encoder_layers": 32},
    **{"encoder_attention_heads": 20, "encoder_ffn_dim": 5120},
}
ASR: Json = SHARED | {
    **{"d_model": 1024, "encoder_layers": 24},
    **{"encoder_attention_heads": 16, "encoder_ffn_dim": 4096},
}
"""transformers' defaults for keys that `audio_config` lacks."""


def qwen3_omni(source: ModelSource) -> ModelSpec:
    return chosen_tower(source, omni_vision, omni_audio)


def omni_vision(source: ModelSource) -> ModelSpec:
    """Takes images only, because the model may also hear the sound of videos."""
    processor = source.image_processor(CLIP_PIXELS)
    model = with_deepstack(source, source.vision, processor, PIXELS)
    return replace(model, family="qwen3_omni")


def omni_audio(source: ModelSource) -> ModelSpec:
    return in_chunks("qwen3_omni", source, OMNI | (source.config.get("audio_config") or {}))


def qwen3_asr(source: ModelSource) -> ModelSpec:
    """As published at first, within a `thinker_config`, or as transformers saves it."""
    thinker = source.config.get("thinker_config")
    encoder = ASR | ((thinker or source.config).get("audio_config") or {})
    return in_chunks("qwen3_asr", source, encoder, projector=thinker is None)


def in_chunks(
    family: str, source: ModelSource, encoder: Json, *, projector: bool = False
) -> ModelSpec:
    """`projector`: the last two layers are a module of their own in the checkpoint."""
    only(encoder, {"n_window": WINDOW}, "the audio encoder")
    encoder = usual(encoder) | {"projector": projector}
    extractor = feature_extractor(source, encoder)
    attended, rest = divmod(int(encoder["n_window_infer"]), 2 * WINDOW)
    if rest or not attended:
        raise ValueError(f"n_window_infer of the audio encoder: not a multiple of {2 * WINDOW}")
    asr = family == "qwen3_asr"
    sizing = ChunkSizing(
        *log_mel_sizes(extractor, encoder),
        window_frames=2 * WINDOW,
        stack=1,
        most_seconds=math.inf,
        attended=attended,
        least_samples=int(extractor.get("min_length", LEAST_SAMPLES)) if asr else 0,
        whole=asr,
    )
    return source.spec(family, SILENCE, encoder, sizing, encoder["output_dim"], folder="qwen3_omni")


MODEL_TYPES = {"qwen3_omni_moe": qwen3_omni, "qwen3_asr": qwen3_asr}
VISION_DEFAULTS = {"qwen3_omni_moe": TOWER}
