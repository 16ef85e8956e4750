"""GLM-4.1V and GLM-4.5V: transformers.models.glm4v. GLM-4.6V: transformers.models.glm46v.

GLM-4.6V is published with the `model_type` of the others. Its processor tells them apart.
"""

from __future__ import annotations

from actors.spec.checkpoint import Json
from actors.spec.model_spec import ModelSpec
from actors.spec.sampling import Sampling, Thinning, Timed
from actors.spec.settings import CLIP_PIXELS, ModelSource, only, pixel_range, total_pixels
from actors.spec.sizing import EnlargingSizing
from actors.spec.video import FRAMES_PER_GROUP, TotalPixels, VideoStyle


def glm4v(source: ModelSource) -> ModelSpec:
    """With videos as in transformers' Glm4vVideoProcessor."""
    settings = source.video_processor()
    rule = Timed(float(settings.get("fps") or 2), float(settings.get("max_duration") or 300))
    return glm(source, rule)


def glm46v(source: ModelSource) -> ModelSpec:
    """With videos as in transformers' Glm46VVideoProcessor."""
    return glm(source, Thinning(FRAMES_PER_GROUP))


def glm(
    source: ModelSource, rule: Sampling, family: str = "glm4v", *, bias: bool = False
) -> ModelSpec:
    vision, processor = source.vision, source.image_processor(CLIP_PIXELS)
    only(vision, {"hidden_act": "silu", "attention_bias": bias}, "vision_config")
    smallest, largest = pixel_range(processor, 12544, 11760000)
    # The range counts the pixels of all frames of a group. An image fills all of them.
    frames = int(vision["temporal_patch_size"])
    patch, merge = int(vision["patch_size"]), int(vision["spatial_merge_size"])
    sizing = EnlargingSizing(patch, merge, -(-smallest // frames), largest // frames)
    width = vision["out_hidden_size"]
    model = source.spec(family, processor, vision, sizing, width, folder="glm4v")
    limits = total_pixels(source.video_processor(), 112 * 112, 28 * 28 * 2 * 30000)
    return source.with_video(model, TotalPixels(rule, patch, merge, FRAMES_PER_GROUP, *limits))


MODEL_TYPES = {"glm4v": glm4v, "glm4v_moe": glm4v, "glm46v": glm46v}
PROCESSORS = {"Glm4v": "glm4v", "Glm46V": "glm46v"}
"""Overrides `model_type`, because the processor decides how videos are sampled and how times are
written."""

TOWER: Json = {
    **{"depth": 24, "hidden_size": 1536, "intermediate_size": 13696, "num_heads": 12},
    **{"image_size": 336, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
    **{"out_hidden_size": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu"},
}
VISION_DEFAULTS = dict.fromkeys(MODEL_TYPES, TOWER)

GLM4V = VideoStyle("glm4v", "<|begin_of_image|>", "<|end_of_image|>{whole}", as_images=True)
GLM46V = VideoStyle(
    "glm4v", "<|begin_of_image|>", "<|end_of_image|>{seconds:.1f} seconds", as_images=True
)
VIDEO_STYLES = {"glm4v": GLM4V, "glm4v_moe": GLM4V, "glm46v": GLM46V}
