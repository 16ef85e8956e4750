"""Whisper's encoder: transformers.models.whisper. Its rows are what Whisper's decoder reads."""

from __future__ import annotations

from actors.spec.audio import STRIDE, AudioSizing
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
    """The spec of a model over Whisper's encoder. `encoder`: its configuration, under the names on
    either side of USUAL. The last four: see AudioSizing."""
    only(encoder, {"activation_function": "gelu"}, "the audio encoder")
    encoder |= {usual: encoder[own] for usual, own in USUAL.items() if own in encoder}
    extractor = EXTRACTOR | feature_extractor(source)
    sizing = AudioSizing(
        rate=int(extractor["sampling_rate"]),
        hop=int(extractor["hop_length"]),
        fft=int(extractor["n_fft"]),
        mels=int(encoder["num_mel_bins"]),
        window_frames=STRIDE * int(encoder["max_source_positions"]),
        stack=stack,
        whole=whole,
        several=several,
    )
    fixed = {
        "feature_size": sizing.mels,
        "chunk_length": sizing.window_samples / sizing.rate,
        "dither": 0.0,
        "padding_value": 0.0,
    }
    only(extractor, fixed, "the feature extractor")
    if sizing.window_tokens * STRIDE * stack != sizing.window_frames:
        raise ValueError(f"max_source_positions: no multiple of {stack}, the positions of a token")
    return source.spec(family, SILENCE, encoder, sizing, width)


def feature_extractor(source: ModelSource) -> Json:
    """The feature extractor's settings; transformers 5 saves them in processor_config.json."""
    settings = source.files.read_json("preprocessor_config.json")
    if settings is None:
        together = source.files.read_json("processor_config.json") or {}
        settings = together.get("feature_extractor", {})
    return dict(settings)


MODEL_TYPES = {"whisper": whisper}
