"""Qwen3-VL and Qwen3.5, dense and MoE: transformers.models.qwen3_vl, qwen3_5."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from actors.options import ModelOptions
from actors.spec.checkpoint import Files, Json
from actors.spec.model_spec import ModelSpec
from actors.spec.sampling import Spread
from actors.spec.settings import (
    HALVES,
    Reader,
    frame_settings,
    group_sizes,
    image_processor,
    image_spec,
    pixel_range,
    total_pixels,
    video_processor,
    with_video,
)
from actors.spec.sizing import PackedSizing
from actors.spec.video import MeanTimes, VideoStyle


def qwen3vl(options: ModelOptions, files: Files, config: Json) -> ModelSpec:
    vision, processor = config["vision_config"], image_processor(files)
    deepstack = len(vision["deepstack_visual_indexes"])
    sizing = PackedSizing(
        int(vision["patch_size"]),
        int(vision["spatial_merge_size"]),
        *pixel_range(processor, 65536, 16777216),
    )
    width = int(vision["out_hidden_size"]) * (1 + deepstack)
    model = image_spec("qwen3_vl", options, HALVES | processor, vision, sizing, width)
    return spread_video(replace(model, deepstack=deepstack), files)


def qwen35(options: ModelOptions, files: Files, config: Json) -> ModelSpec:
    """Qwen3-VL's tower without deepstack."""
    vision = config["vision_config"] | {"deepstack_visual_indexes": []}
    return replace(qwen3vl(options, files, {"vision_config": vision}), family="qwen3_5")


def spread_video(model: ModelSpec, files: Files) -> ModelSpec:
    """With videos as in transformers' Qwen3VLVideoProcessor."""
    settings = video_processor(files)
    capped = settings.get("cap_pixels_per_frame")
    video = MeanTimes(
        Spread(*frame_settings(settings)),
        *group_sizes(model.vision),
        *total_pixels(settings, 128 * 32 * 32, 768 * 32 * 32),
        most_frame_tokens=int(settings.get("max_video_tokens", 768)) if capped else 0,
    )
    return with_video(model, settings, video)


MODEL_TYPES: Mapping[str, Reader] = {
    "qwen3_vl": qwen3vl,
    "qwen3_vl_moe": qwen3vl,
    "qwen3_5": qwen35,
    "qwen3_5_moe": qwen35,
}

GROUP = ("<{seconds:.1f} seconds><|vision_start|>", "<|vision_end|>")
VIDEO_STYLES: Mapping[str, VideoStyle] = {
    "qwen3_vl": VideoStyle("qwen3_vl", *GROUP),
    "qwen3_vl_moe": VideoStyle("qwen3_vl", *GROUP),
    "qwen3_5": VideoStyle("qwen3_5", *GROUP),
    "qwen3_5_moe": VideoStyle("qwen3_5", *GROUP),
}
