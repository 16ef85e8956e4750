"""Qwen3-VL and Qwen3.5, dense and MoE: transformers.models.qwen3_vl, qwen3_5."""

from __future__ import annotations

from dataclasses import replace

from actors.spec.checkpoint import Json
from actors.spec.model_spec import ModelSpec
from actors.spec.sampling import Spread
from actors.spec.settings import (
    HALVES,
    ModelSource,
    frame_settings,
    only,
    pixel_range,
    total_pixels,
)
from actors.spec.sizing import PackedSizing
from actors.spec.video import FRAMES_PER_GROUP, MeanTimes, VideoStyle

PIXELS = (65536, 16777216)
"""The range of an image's pixels, if the image processor does not say."""


def qwen3vl(source: ModelSource) -> ModelSpec:
    return timed_video(source, source.vision)


def qwen35(source: ModelSource) -> ModelSpec:
    """Qwen3-VL's tower without deepstack."""
    model = timed_video(source, source.vision | {"deepstack_visual_indexes": []})
    return replace(model, family="qwen3_5")


def with_deepstack(
    source: ModelSource, vision: Json, processor: Json, pixels: tuple[int, int]
) -> ModelSpec:
    """`pixels`: the range of an image's pixels, if the image processor does not say."""
    only(vision, {"hidden_act": "gelu_pytorch_tanh"}, "vision_config")
    deepstack = len(vision["deepstack_visual_indexes"])
    patch, merge = int(vision["patch_size"]), int(vision["spatial_merge_size"])
    sizing = PackedSizing(patch, merge, *pixel_range(processor, *pixels))
    width = int(vision["out_hidden_size"]) * (1 + deepstack)
    model = source.spec("qwen3_vl", processor, vision, sizing, width)
    return replace(model, deepstack=deepstack)


def timed_video(source: ModelSource, vision: Json) -> ModelSpec:
    """With videos as in transformers' Qwen3VLVideoProcessor."""
    model = with_deepstack(source, vision, source.image_processor(HALVES), PIXELS)
    settings = source.video_processor()
    capped = settings.get("cap_pixels_per_frame")
    video = MeanTimes(
        Spread(*frame_settings(settings)),
        *(model.sizing.patch_size, model.sizing.merge_size, FRAMES_PER_GROUP),
        *total_pixels(settings, 128 * 32 * 32, 768 * 32 * 32),
        most_frame_tokens=int(settings.get("max_video_tokens", 768)) if capped else 0,
    )
    return source.with_video(model, video)


MODEL_TYPES = {
    "qwen3_vl": qwen3vl,
    "qwen3_vl_moe": qwen3vl,
    "qwen3_5": qwen35,
    "qwen3_5_moe": qwen35,
}
TOWER: Json = {
    **{"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16},
    **{"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2},
    **{"out_hidden_size": 3584, "num_position_embeddings": 2304},
    **{"deepstack_visual_indexes": [8, 16, 24], "hidden_act": "gelu_pytorch_tanh"},
}
VISION_DEFAULTS = dict.fromkeys(MODEL_TYPES, TOWER)

GROUP = ("<{seconds:.1f} seconds><|vision_start|>", "<|vision_end|>")
VIDEO_STYLES = {
    "qwen3_vl": VideoStyle("qwen3_vl", *GROUP),
    "qwen3_vl_moe": VideoStyle("qwen3_vl", *GROUP),
    "qwen3_5": VideoStyle("qwen3_5", *GROUP),
    "qwen3_5_moe": VideoStyle("qwen3_5", *GROUP),
}
