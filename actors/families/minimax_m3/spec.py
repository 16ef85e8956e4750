"""MiniMax-M3: images. transformers.models.minimax_m3_vl."""

from __future__ import annotations

from actors.spec.checkpoint import Json
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import CLIP_PIXELS, ModelSource, only, pixel_range
from actors.spec.sizing import PackedSizing

COMPRESSION = "img_token_compression_config"
"""A key of the published `vision_config`, whose sizes transformers saves in `vision_config`."""

IGNORED_SIZE = [672, 672]
"""The size in the published image processor's file. transformers uses its own default instead."""


def minimax_m3(source: ModelSource) -> ModelSpec:
    """Videos are not supported, because the processor does not say which frames to take."""
    processor = source.image_processor(CLIP_PIXELS)
    if processor.get("size") == IGNORED_SIZE:
        del processor["size"]
    compression = source.config["vision_config"].get(COMPRESSION) or {}
    only(compression, {"image_token_compression_method": "patch_merge"}, COMPRESSION)
    vision = source.vision | compression
    rotary = {"position_embedding_type": "rope", "rope_mode": "3d"}
    only(vision, {"hidden_act": "gelu"} | rotary, "vision_config")
    whole = {"vision_feature_layer": -1, "projector_hidden_act": "gelu"}
    only(source.config, whole | {"multimodal_projector_bias": True}, "config.json")
    vision["projector_hidden_size"] = source.config.get("projector_hidden_size", 6144)
    patch, merge = int(vision["patch_size"]), int(vision["spatial_merge_size"])
    sizing = PackedSizing(patch, merge, *pixel_range(processor, 3136, 451584))
    return source.spec("minimax_m3", processor, vision, sizing, source.text_width)


MODEL_TYPES = {"minimax_m3_vl": minimax_m3}
VISION_DEFAULTS: dict[str, Json] = {
    "minimax_m3_vl": {
        **{"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32},
        **{"num_attention_heads": 16, "patch_size": 14, "spatial_merge_size": 2},
        **{"temporal_patch_size": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-5},
    }
}
