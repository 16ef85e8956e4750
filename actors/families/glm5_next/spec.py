"""GLM-5.3-Flash: transformers.models.glm5_next."""

from __future__ import annotations

from actors.families.glm_ocr.spec import VISION_DEFAULTS as OCR
from actors.spec.checkpoint import Json
from actors.spec.model_spec import ModelSpec
from actors.spec.sampling import Thinned
from actors.spec.settings import CLIP_PIXELS, ModelSource, only
from actors.spec.sizing import CanvasSizing
from actors.spec.video import FRAMES_PER_GROUP, CanvasPixels


def glm5_next(source: ModelSource) -> ModelSpec:
    vision, processor = source.vision, source.image_processor(CLIP_PIXELS)
    fixed = {"hidden_act": "silu", "attention_bias": True, "swiglu_limit": 10.0}
    only(vision, fixed, "vision_config")
    patch, merge = int(vision["patch_size"]), int(vision["spatial_merge_size"])
    token_pixels = (patch * merge) ** 2
    sizing = CanvasSizing(patch, merge, *token_range(processor, token_pixels, 8000))
    width = vision["out_hidden_size"]
    model = source.spec("glm5_next", processor, vision, sizing, width, folder="glm4v")
    settings, group = source.video_processor(), FRAMES_PER_GROUP
    only(settings, {"max_duration": 0}, "the video processor")
    rule = Thinned(float(settings.get("fps") or 2), int(settings.get("max_frames") or 2048))
    limits = token_range(settings, token_pixels * group, 240000)
    return source.with_video(model, CanvasPixels(rule, patch, merge, group, *limits))


def token_range(settings: Json, token_pixels: int, most: int) -> tuple[int, int]:
    """A processor's range of tokens, in pixels."""
    only(settings, {"patch_expand_factor": 1}, "the image or video processor")
    tokens = settings.get("min_image_tokens") or 16, settings.get("max_image_tokens") or most
    return int(tokens[0]) * token_pixels, int(tokens[1]) * token_pixels


MODEL_TYPES = {"glm5_next": glm5_next}
VISION_DEFAULTS = {
    "glm5_next": OCR["glm_ocr"] | {"projection_intermediate_size": 10240, "swiglu_limit": 10.0}
}
