"""Nemotron-H Omni: transformers.models.nemotron_h_omni.

Its vision tower, for images and videos, is RADIO, its audio encoder Parakeet, a conformer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from actors.families.whisper.spec import SILENCE
from actors.spec.audio import at_16_khz
from actors.spec.checkpoint import Json
from actors.spec.model_spec import ModelSpec
from actors.spec.sampling import Evenly
from actors.spec.settings import CLIP_PIXELS, ModelSource, only
from actors.spec.sizing import PatchRange
from actors.spec.video import FRAMES_PER_GROUP, TargetPatches

MERGE = 2
"""The side of the pixel shuffle."""

SIZE = "-h"
"""The suffix of the names of towers of the usual size."""

FPS, MOST_FRAMES = 2.0, 256
"""As in the model card. By default, the processor takes every frame."""


def nemotron_h_omni(source: ModelSource) -> ModelSpec:
    """Images and videos, unless `model.tower` says otherwise. Reads today's keys, or those of the
    published files."""
    if source.options.tower == "audio":
        return sounds(source)
    config, vision = source.config, vision_of(source)
    text = config.get("text_config") or config["llm_config"]
    pixels = {"downsample_ratio": 1 / MERGE, "patch_size": vision["patch_size"]}
    processor = with_pixels(source.image_processor({}))
    for settings, whose in ((config, "config.json"), (processor, "the image processor")):
        only(settings, pixels, whose)
    least, tokens = (
        int(processor.get(key) or usual)
        for key, usual in (("min_num_patches", 1024), ("max_model_len", 16384))
    )
    most = (tokens - 4) * MERGE**2
    if capped := int(processor.get("max_num_patches", 13312)):
        most = min(most, capped)
    if least >= most:
        raise ValueError(f"min_num_patches: {least}, where only fewer than {most} are supported")
    vision |= {
        "final_norm": int(text.get("num_nextn_predict_layers") or 0) > 0,
        "projector_hidden_size": int(config.get("projector_hidden_size") or 4096),
    }
    sizing = PatchRange(int(vision["patch_size"]), MERGE, min_patches=least, max_patches=most)
    width = text["hidden_size"]
    model = source.spec("nemotron_h_omni", processor, vision, sizing, width)
    if vision["video_temporal_patch_size"] != FRAMES_PER_GROUP:
        return model
    settings = with_pixels(source.video_processor())
    only(settings, pixels | {"video_maintain_aspect_ratio": True}, "the video processor")
    only(settings, {"temporal_patch_size": FRAMES_PER_GROUP}, "the video processor")
    rule = Evenly(MOST_FRAMES, float(settings.get("fps") or FPS), by_fps=True)
    if settings.get("num_frames"):
        rule = Evenly(int(settings["num_frames"]))
    target = int(settings.get("video_target_num_patches") or 1024)
    video = TargetPatches(rule, sizing.patch_size, MERGE, FRAMES_PER_GROUP, patches=target)
    return source.with_video(model, video)


def sounds(source: ModelSource) -> ModelSpec:
    config = source.config
    given = config.get("audio_config") or config.get("sound_config")
    if not given:
        raise ValueError("audio_config: there is none, and so no audio tower")
    encoder = PARAKEET | given
    mels, positions = int(encoder["num_mel_bins"]), int(encoder["max_position_embeddings"])
    only(encoder, FIXED, "the audio encoder")
    if positions < 1:
        raise ValueError(f"max_position_embeddings of the audio encoder: {positions}")
    if not int(encoder["conv_kernel_size"]) % 2:
        raise ValueError("conv_kernel_size of the audio encoder: only odd numbers are supported")
    source.feature_extractor(mels, EXTRACTOR)
    sizing = at_16_khz(
        mels=mels,
        window_frames=positions * 2**HALVINGS,
        most_seconds=positions * 2**HALVINGS / 100,
        halvings=HALVINGS,
        features="parakeet",
        less=0,
        least_frames=2,
        more_frames=1,
    )
    text = config.get("text_config") or config["llm_config"]
    model = source.spec("nemotron_h_omni", SILENCE, encoder, sizing, text["hidden_size"])
    return replace(model, fast_blocks=None)


def vision_of(source: ModelSource) -> Json:
    """`vision_config`; published ones name the tower's size and state little of it."""
    config, vision = source.config, source.vision
    if not ("hidden_size" in config["vision_config"] or vision.get("version", SIZE).endswith(SIZE)):
        raise ValueError(f"version of vision_config: only those that end with {SIZE} are supported")
    vision["video_temporal_patch_size"] = config.get(
        "video_temporal_patch_size", vision["video_temporal_patch_size"]
    )
    fixed = {"hidden_act": "gelu", "use_swiglu_ffn": False, "qkv_bias": True}
    only(vision, fixed | {"layerscale_value": 1.0}, "vision_config")
    for key in ("vision_hidden_size", "vit_hidden_size"):
        only(config, {key: vision["hidden_size"]}, "config.json")
    return vision | {"intermediate_size": int(vision["hidden_size"] * vision["mlp_ratio"])}


def with_pixels(settings: Json) -> Json:
    """A processor's settings, with today's keys of the mean and standard deviation."""
    found = dict(settings)
    for key, usual in CLIP_PIXELS.items():
        named = settings.get(key.replace("image", "norm"))
        found[key] = settings.get(key) or named or usual
    return found


MODEL_TYPES = {
    "nemotron_h_omni": nemotron_h_omni,
    "NemotronH_Nano_Omni_Reasoning_V3": nemotron_h_omni,
}
REFUSED = {"NemotronH_Nano_VL_V2": "its images are in tiles of a fixed size"}
HALVINGS = 3
PARAKEET: Json = {
    **{"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 8},
    **{"intermediate_size": 4096, "conv_kernel_size": 9, "subsampling_conv_channels": 256},
    **{"num_mel_bins": 80, "max_position_embeddings": 5000},
    **{"attention_bias": False, "convolution_bias": True},
}
"""transformers' defaults for keys that `audio_config` lacks."""
FIXED: Json = {
    **{"hidden_act": "silu", "subsampling_factor": 2**HALVINGS, "scale_input": False},
    **{"subsampling_conv_kernel_size": 3, "subsampling_conv_stride": 2, "sampling_rate": 16000},
}
EXTRACTOR: Json = {
    **{"sampling_rate": 16000, "hop_length": 160, "n_fft": 512, "win_length": 400},
    "preemphasis": 0.97,
}
TOWER: Json = {
    **{"hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 16, "mlp_ratio": 4.0},
    **{"hidden_act": "gelu", "layer_norm_eps": 1e-6, "use_swiglu_ffn": False, "qkv_bias": True},
    **{"patch_size": 16, "max_img_size": 2048, "num_cls_tokens": 3, "num_registers": 7},
    "video_temporal_patch_size": FRAMES_PER_GROUP,
}
VISION_DEFAULTS: Mapping[str, Json] = dict.fromkeys(MODEL_TYPES, TOWER)
