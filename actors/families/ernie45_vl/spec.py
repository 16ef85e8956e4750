"""ERNIE-4.5-VL, images only: transformers.models.ernie4_5_vl_moe, and the published files' own."""

from __future__ import annotations

from actors.spec.checkpoint import Json
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import CLIP_PIXELS, ModelSource, only, pixel_range
from actors.spec.sizing import PackedSizing


def ernie45_vl(source: ModelSource) -> ModelSpec:
    vision, processor = source.vision, source.image_processor(CLIP_PIXELS)
    only(vision, {"hidden_act": "quick_gelu", "temporal_merge_size": 2}, "vision_config")
    if "mlp_ratio" in vision:
        vision["intermediate_size"] = int(vision["mlp_ratio"] * vision["hidden_size"])
    # In the published files, the language model's settings are not in text_config.
    text = source.config.get("text_config", source.config)
    vision |= {"resampler_epsilon": text.get("rms_norm_eps", 1e-5)}
    patch, merge = int(vision["patch_size"]), int(vision["spatial_merge_size"])
    sizing = PackedSizing(patch, merge, *pixel_range(processor, 56 * 56, 28 * 28 * 6177))
    family, width = "ernie4_5_vl_moe", text["hidden_size"]
    return source.spec(family, processor, vision, sizing, width, folder="ernie45_vl")


MODEL_TYPES = {"ernie4_5_vl_moe": ernie45_vl, "ernie4_5_moe_vl": ernie45_vl}

TOWER: Json = {
    **{"depth": 32, "hidden_size": 1280, "intermediate_size": 5120, "num_heads": 16},
    **{"patch_size": 14, "spatial_merge_size": 2, "rms_norm_eps": 1e-6},
    "hidden_act": "quick_gelu",
}
VISION_DEFAULTS = dict.fromkeys(MODEL_TYPES, TOWER)
