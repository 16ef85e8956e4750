"""GLM-4.1V and GLM-4.5V: transformers.models.glm4v. GLM-4.6V: transformers.models.glm46v."""

from __future__ import annotations

from collections.abc import Mapping

from actors.options import ModelOptions
from actors.spec.checkpoint import Files, Json
from actors.spec.model_spec import ModelSpec
from actors.spec.sampling import Sampling, Thinning, Timed
from actors.spec.settings import (
    CLIP_PIXELS,
    FRAMES_PER_GROUP,
    Reader,
    group_sizes,
    image_processor,
    image_spec,
    only,
    pixel_range,
    total_pixels,
    video_processor,
    with_video,
)
from actors.spec.sizing import EnlargingSizing
from actors.spec.video import TotalPixels, VideoStyle


def glm4v(options: ModelOptions, files: Files, config: Json) -> ModelSpec:
    """With videos as in transformers' Glm4vVideoProcessor."""
    settings = video_processor(files)
    rule = Timed(float(settings.get("fps") or 2), float(settings.get("max_duration") or 300))
    return glm(options, files, config, rule)


def glm46v(options: ModelOptions, files: Files, config: Json) -> ModelSpec:
    """With videos as in transformers' Glm46VVideoProcessor."""
    return glm(options, files, config, Thinning(FRAMES_PER_GROUP))


def glm(options: ModelOptions, files: Files, config: Json, rule: Sampling) -> ModelSpec:
    vision, processor = config["vision_config"], image_processor(files)
    only(vision, {"hidden_act": "silu", "attention_bias": False}, "vision_config")
    smallest, largest = pixel_range(processor, 12544, 11760000)
    # The range counts the pixels of all frames of a group; an image fills each of them.
    frames = int(vision["temporal_patch_size"])
    sizing = EnlargingSizing(
        patch_size=int(vision["patch_size"]),
        merge_size=int(vision["spatial_merge_size"]),
        min_pixels=-(-smallest // frames),
        max_pixels=largest // frames,
    )
    pixels, width = CLIP_PIXELS | processor, vision["out_hidden_size"]
    model = image_spec("glm4v", options, pixels, vision, sizing, width)
    settings = video_processor(files)
    limits = total_pixels(settings, 112 * 112, 28 * 28 * 2 * 30000)
    return with_video(model, settings, TotalPixels(rule, *group_sizes(vision), *limits))


MODEL_TYPES: Mapping[str, Reader] = {"glm4v": glm4v, "glm4v_moe": glm4v, "glm46v": glm46v}

GLM4V = VideoStyle("glm4v", "<|begin_of_image|>", "<|end_of_image|>{whole}", as_images=True)
GLM46V = VideoStyle(
    "glm4v", "<|begin_of_image|>", "<|end_of_image|>{seconds:.1f} seconds", as_images=True
)
VIDEO_STYLES: Mapping[str, VideoStyle] = {"glm4v": GLM4V, "glm4v_moe": GLM4V, "glm46v": GLM46V}
