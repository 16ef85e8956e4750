"""Qwen2-VL, Qwen2.5-VL and EXAONE 4.5: transformers.models.qwen2_vl, qwen2_5_vl, exaone4_5."""

from __future__ import annotations

from collections.abc import Mapping

from actors.spec.checkpoint import Json
from actors.spec.model_spec import ModelSpec
from actors.spec.sampling import Strided
from actors.spec.settings import CLIP_PIXELS, ModelSource, frame_settings, only, pixel_range
from actors.spec.sizing import PackedSizing, WindowedSizing
from actors.spec.video import FRAMES_PER_GROUP, FramePixels, VideoStyle

PIXELS = (3136, 1003520)
"""The range of an image's pixels, if the image processor does not say."""


def qwen2vl(source: ModelSource) -> ModelSpec:
    """The `hidden_size` of `vision_config` is the language model's."""
    vision, processor = source.vision, source.image_processor(CLIP_PIXELS)
    only(vision, {"hidden_act": "quick_gelu"}, "vision_config")
    patch, merge = int(vision["patch_size"]), int(vision["spatial_merge_size"])
    sizing = PackedSizing(patch, merge, *pixel_range(processor, *PIXELS))
    model = source.spec("qwen2_vl", processor, vision, sizing, vision["hidden_size"])
    return strided_video(model, source)


def qwen25vl(source: ModelSource) -> ModelSpec:
    return strided_video(in_windows(source), source)


def exaone45(source: ModelSource) -> ModelSpec:
    """Like Qwen2.5-VL, but with grouped-query attention."""
    return strided_video(in_windows(source, "exaone4_5"), source)


def in_windows(source: ModelSource, family: str = "qwen2_5_vl") -> ModelSpec:
    vision, processor = source.vision, source.image_processor(CLIP_PIXELS)
    only(vision, {"hidden_act": "silu"}, "vision_config")
    patch, merge = int(vision["patch_size"]), int(vision["spatial_merge_size"])
    window = int(vision["window_size"]) // (patch * merge)
    sizing = WindowedSizing(patch, merge, *pixel_range(processor, *PIXELS), window)
    width = vision["out_hidden_size"]
    return source.spec(family, processor, vision, sizing, width, folder="qwen2_vl")


def strided_video(model: ModelSpec, source: ModelSource) -> ModelSpec:
    """With videos as in transformers' Qwen2VLVideoProcessor."""
    settings = source.video_processor()
    smallest, largest = pixel_range(settings, 128 * 28 * 28, 768 * 28 * 28)
    capped = settings.get("cap_pixels_per_frame")
    video = FramePixels(
        Strided(
            *frame_settings(settings),
            FRAMES_PER_GROUP,
            num_frames=int(settings.get("num_frames") or 0),
        ),
        *(model.sizing.patch_size, model.sizing.merge_size, FRAMES_PER_GROUP),
        min_pixels=smallest,
        max_pixels=largest,
        most_tokens=int(settings.get("max_video_tokens", 128000)) if capped else 0,
    )
    return source.with_video(model, video)


MODEL_TYPES = {"qwen2_vl": qwen2vl, "qwen2_5_vl": qwen25vl, "exaone4_5": exaone45}
SHARED: Json = {
    **{"depth": 32, "hidden_size": 3584, "num_heads": 16},
    **{"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
}
TOWER_25: Json = SHARED | {
    **{"intermediate_size": 3420, "out_hidden_size": 3584, "hidden_act": "silu"},
    **{"window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]},
}
VISION_DEFAULTS: Mapping[str, Json] = {
    "qwen2_vl": SHARED | {"embed_dim": 1280, "mlp_ratio": 4, "hidden_act": "quick_gelu"},
    "qwen2_5_vl": TOWER_25,
    "exaone4_5": TOWER_25 | {"num_key_value_heads": 8},
}
VIDEO_STYLES = {
    "qwen2_vl": VideoStyle("qwen2_vl"),
    "qwen2_5_vl": VideoStyle("qwen2_5_vl", timed=True),
}
