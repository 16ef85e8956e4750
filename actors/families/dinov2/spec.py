"""DINOv2, with and without register tokens: transformers.models.dinov2, dinov2_with_registers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from actors.spec.checkpoint import Json
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import CLIP_PIXELS, ModelSource, only, shorter_side, side
from actors.spec.tiles import OneTile


def dinov2(source: ModelSource) -> ModelSpec:
    """Rows of the last hidden state, the class token's first, or only the class token's."""
    return tower("dinov2", source)


def with_registers(source: ModelSource) -> ModelSpec:
    """Like `dinov2`, but the rows of the register tokens follow that of the class token."""
    return tower("dinov2_with_registers", source)


def tower(family: str, source: ModelSource) -> ModelSpec:
    vision = source.tower
    only(vision, {"hidden_act": "gelu", "qkv_bias": True}, "config.json")
    mlp_width = int(vision["hidden_size"] * vision["mlp_ratio"])
    if vision["use_swiglu_ffn"]:  # transformers: Dinov2SwiGLUFFN
        mlp_width = (int(mlp_width * 2 / 3) + 7) // 8 * 8
    vision["intermediate_size"] = mlp_width
    processor = source.image_processor(CLIP_PIXELS)
    only(processor, {"do_center_crop": True}, "the image processor")
    shorter, pixels = shorter_side(processor["size"]), side(processor["crop_size"])
    if not isinstance(shorter, int) or shorter < pixels:
        raise ValueError(
            f"size of the image processor: {shorter}, where only a shortest_edge of at least "
            f"crop_size, {pixels}, is supported"
        )
    patch = side(vision["patch_size"])
    sizing = OneTile(
        tile_pixels=pixels // patch * patch,
        patch_size=patch,
        merge_size=1,
        max_tiles=1,
        picture_pixels=pixels,
        cropped=True,
        class_tokens=1 + int(vision.get("num_register_tokens", 0)),
        pooled=source.options.output == "vector",
        shorter_pixels=shorter,
    )
    spec = source.spec(family, processor, vision, sizing, vision["hidden_size"], folder="dinov2")
    return replace(spec, vector=sizing.pooled)


MODEL_TYPES = {"dinov2": dinov2, "dinov2_with_registers": with_registers}
BASE: Json = {
    **{"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "mlp_ratio": 4},
    **{"image_size": 224, "patch_size": 14, "hidden_act": "gelu", "layer_norm_eps": 1e-6},
    **{"qkv_bias": True, "use_swiglu_ffn": False},
}
VISION_DEFAULTS: Mapping[str, Json] = {
    "dinov2": BASE,
    "dinov2_with_registers": BASE | {"patch_size": 16, "num_register_tokens": 4},
}
