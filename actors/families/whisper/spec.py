"""Whisper's encoder: transformers.models.whisper. Its rows are what Whisper's decoder reads."""

from __future__ import annotations

import math

from actors.spec.audio import STRIDE, WhisperSizing
from actors.spec.checkpoint import Json
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import ModelSource, only

SILENCE: Json = {"image_mean": 0.0, "image_std": 1.0}
"""Log-mel frames are not normalised."""

EXTRACTOR: Json = {
    **{"sampling_rate": 16000, "hop_length": 160, "chunk_length": 30, "n_fft": 400},
}
ENCODER: Json = {
    **{"d_model": 384, "encoder_layers": 4, "encoder_attention_heads": 6, "encoder_ffn_dim": 1536},
    **{"num_mel_bins": 80, "max_source_positions": 1500},
}
"""transformers' defaults for keys that the feature extractor's file and config.json lack."""

USUAL = {
    "hidden_size": "d_model",
    "num_hidden_layers": "encoder_layers",
    "num_attention_heads": "encoder_attention_heads",
    "intermediate_size": "encoder_ffn_dim",
}
"""The usual name of each of the encoder's own keys."""


def whisper(source: ModelSource) -> ModelSpec:
    encoder: Json = ENCODER | source.config
    return over_whisper("whisper", source, encoder, encoder["d_model"], whole=True)


def over_whisper(
    family: str,
    source: ModelSource,
    encoder: Json,
    width: int,
    stack: int = 1,
    *,
    whole: bool,
    several: bool = False,
) -> ModelSpec:
    """The spec of a model over Whisper's encoder. `encoder`: its configuration, with the keys on
    either side of USUAL. `several`: sounds may have several windows. For the others, see
    WhisperSizing."""
    encoder = usual(encoder)
    extractor = feature_extractor(source, encoder)
    frames = STRIDE * int(encoder["max_source_positions"])
    seconds = frames * int(extractor["hop_length"]) / int(extractor["sampling_rate"])
    only(extractor, {"chunk_length": seconds}, "the feature extractor")
    if frames % (STRIDE * stack):
        raise ValueError(
            f"max_source_positions: not a multiple of {stack}, the positions per token"
        )
    sizing = WhisperSizing(
        *log_mel_sizes(extractor, encoder),
        window_frames=frames,
        stack=stack,
        most_seconds=math.inf if several else seconds,
        whole=whole,
    )
    return source.spec(family, SILENCE, encoder, sizing, width)


def usual(encoder: Json) -> Json:
    """An encoder's configuration, with the usual names of its keys added."""
    only(encoder, {"activation_function": "gelu"}, "the audio encoder")
    return encoder | {name: encoder[own] for name, own in USUAL.items() if own in encoder}


def feature_extractor(source: ModelSource, encoder: Json) -> Json:
    """The feature extractor's settings, with transformers' defaults."""
    settings = source.feature_extractor(int(encoder["num_mel_bins"]), {"dither": 0.0})
    return EXTRACTOR | settings


def log_mel_sizes(extractor: Json, encoder: Json) -> tuple[int, int, int, int]:
    """The first fields of an AudioSizing."""
    rate, hop, fft = (int(extractor[key]) for key in ("sampling_rate", "hop_length", "n_fft"))
    return rate, hop, fft, int(encoder["num_mel_bins"])


MODEL_TYPES = {"whisper": whisper}
