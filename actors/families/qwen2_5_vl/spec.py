"""Qwen2.5-VL: transformers.models.qwen2_5_vl."""

from __future__ import annotations

from collections.abc import Mapping

from actors.families.qwen2_vl.spec import PIXELS, strided_video
from actors.options import ModelOptions
from actors.spec.checkpoint import Files, Json
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import (
    CLIP_PIXELS,
    Reader,
    image_processor,
    image_spec,
    only,
    pixel_range,
)
from actors.spec.sizing import WindowedSizing
from actors.spec.video import VideoStyle


def qwen25vl(options: ModelOptions, files: Files, config: Json) -> ModelSpec:
    vision, processor = config["vision_config"], image_processor(files)
    only(vision, {"hidden_act": "silu"}, "vision_config")
    patch, merge = int(vision["patch_size"]), int(vision["spatial_merge_size"])
    window = int(vision["window_size"]) // (patch * merge)
    sizing = WindowedSizing(patch, merge, *pixel_range(processor, *PIXELS), window)
    pixels, width = CLIP_PIXELS | processor, vision["out_hidden_size"]
    return strided_video(image_spec("qwen2_5_vl", options, pixels, vision, sizing, width), files)


MODEL_TYPES: Mapping[str, Reader] = {"qwen2_5_vl": qwen25vl}
VIDEO_STYLES: Mapping[str, VideoStyle] = {"qwen2_5_vl": VideoStyle("qwen2_5_vl", timed=True)}
