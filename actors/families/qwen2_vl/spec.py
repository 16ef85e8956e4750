"""Qwen2-VL: transformers.models.qwen2_vl."""

from __future__ import annotations

from collections.abc import Mapping

from actors.options import ModelOptions
from actors.spec.checkpoint import Files, Json
from actors.spec.model_spec import ModelSpec
from actors.spec.sampling import Strided
from actors.spec.settings import (
    CLIP_PIXELS,
    FRAMES_PER_GROUP,
    Reader,
    frame_settings,
    group_sizes,
    image_processor,
    image_spec,
    only,
    pixel_range,
    total_pixels,
    video_processor,
    with_video,
)
from actors.spec.sizing import PackedSizing
from actors.spec.video import FramePixels, VideoStyle

PIXELS = (3136, 1003520)
"""The range of an image's pixels, where the image processor does not say."""


def qwen2vl(options: ModelOptions, files: Files, config: Json) -> ModelSpec:
    """The `hidden_size` of `vision_config` is the language model's."""
    vision, processor = config["vision_config"], image_processor(files)
    only(vision, {"hidden_act": "quick_gelu"}, "vision_config")
    sizing = PackedSizing(
        int(vision["patch_size"]),
        int(vision["spatial_merge_size"]),
        *pixel_range(processor, *PIXELS),
    )
    pixels, width = CLIP_PIXELS | processor, vision["hidden_size"]
    return strided_video(image_spec("qwen2_vl", options, pixels, vision, sizing, width), files)


def strided_video(model: ModelSpec, files: Files) -> ModelSpec:
    """With videos as in transformers' Qwen2VLVideoProcessor."""
    settings = video_processor(files)
    smallest, largest = total_pixels(settings, 128 * 28 * 28, 768 * 28 * 28)
    capped = settings.get("cap_pixels_per_frame")
    video = FramePixels(
        Strided(*frame_settings(settings), FRAMES_PER_GROUP),
        *group_sizes(model.vision),
        min_pixels=int(settings.get("min_pixels") or smallest),
        max_pixels=int(settings.get("max_pixels") or largest),
        most_tokens=int(settings.get("max_video_tokens", 128000)) if capped else 0,
    )
    return with_video(model, settings, video)


MODEL_TYPES: Mapping[str, Reader] = {"qwen2_vl": qwen2vl}
VIDEO_STYLES: Mapping[str, VideoStyle] = {"qwen2_vl": VideoStyle("qwen2_vl")}
