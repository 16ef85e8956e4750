"""DINOv3's vision transformers: transformers.models.dinov3_vit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from actors.spec.checkpoint import Json
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import (
    IMAGENET_PIXELS,
    PIL_RESAMPLING,
    ModelSource,
    only,
    resampling,
    side,
)
from actors.spec.tiles import OneTile

PIXELS: Json = IMAGENET_PIXELS | {"resample": PIL_RESAMPLING["bilinear"], "size": 224}


def dinov3(source: ModelSource) -> ModelSpec:
    """Rows of the last hidden state, the class token's first, then those of the register tokens; or
    only the class token's."""
    vision, processor = source.tower, source.image_processor(PIXELS, None)
    only(vision, {"hidden_act": "silu" if vision["use_gated_mlp"] else "gelu"}, "config.json")
    only(processor, {"do_center_crop": False}, "the image processor")
    patch, pixels = side(vision["patch_size"]), side(processor["size"])
    sizing = OneTile(
        tile_pixels=pixels // patch * patch,
        patch_size=patch,
        merge_size=1,
        max_tiles=1,
        picture_pixels=pixels,
        cropped=False,
        class_tokens=1 + int(vision["num_register_tokens"]),
        pooled=source.options.output == "vector",
    )
    mode, width = resampling(processor), vision["hidden_size"]
    spec = source.spec(
        "dinov3_vit", processor, vision, sizing, width, folder="dinov3", resample=mode
    )
    return replace(spec, vector=sizing.pooled)


MODEL_TYPES = {"dinov3_vit": dinov3}
VISION_DEFAULTS: Mapping[str, Json] = {
    "dinov3_vit": {
        **{"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 12},
        **{"num_attention_heads": 6, "patch_size": 16, "num_register_tokens": 0},
        **{"hidden_act": "gelu", "use_gated_mlp": False, "layer_norm_eps": 1e-5},
        **{"query_bias": True, "key_bias": False, "value_bias": True},
        **{"proj_bias": True, "mlp_bias": True, "rope_theta": 100.0},
    }
}

REFUSED = {"dinov3_convnext": "its layers are convolutions without attention (ConvNeXt)"}
