"""DeepSeek-OCR 2: transformers.models.deepseek_ocr2.

deepseek-ai/DeepSeek-OCR-2 has the `model_type` of DeepSeek-OCR, whose reader calls the one here.
"""

from __future__ import annotations

from collections.abc import Mapping

from actors.spec.checkpoint import Json
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import HALVES, ModelSource, only, rope_theta, side
from actors.spec.sizing import PATHS
from actors.spec.tiles import StretchedTiles
from actors.spec.views import PlainCrops

IMAGE_PIXELS, CROP_PIXELS = 1024, 768
"""There are learned queries for these two sizes."""

SAM, ENCODER = "sam_vit_b", "qwen2-0-5b"
"""The names of the towers in the published configuration."""

PUBLISHED_ENCODER: Json = {
    **{"layers": 24, "width": 896, "heads": 14, "key_heads": 2, "mlp_width": 4864},
    **{"epsilon": 1e-6, "theta": 1000000.0},
}
"""Constants of the published code; the configuration has the width only."""


def published(source: ModelSource) -> ModelSpec:
    """Reads the published keys. Settings of the processor have transformers' names."""
    vision, projector = source.vision, source.config["projector_config"]
    only(projector, {"projector_type": "linear"}, "projector_config")
    only(vision["width"][ENCODER], {"dim": PUBLISHED_ENCODER["width"]}, ENCODER)
    sam = dict(vision["width"][SAM])
    # The code uses the width of this encoder; the configuration states that of DeepSeek-OCR's.
    sam["downsample_channels"] = [sam["downsample_channels"][0], PUBLISHED_ENCODER["width"]]
    processor = HALVES | (source.files.read_json("processor_config.json") or {})
    fixed = {"patch_size": 16, "downsample_ratio": 4, "normalize": True}
    only(processor, fixed, "the processor")
    towers = {SAM: sam, ENCODER: PUBLISHED_ENCODER}
    return ocr2(source, processor, vision["image_size"], towers, projector["n_embed"])


def deepseek_ocr2(source: ModelSource) -> ModelSpec:
    """Reads transformers' keys."""
    sam, encoder = source.vision["sam_config"], source.vision["encoder_config"]
    fixed = {
        **{"output_channels": 256, "window_size": 14, "mlp_dim": 4 * sam["hidden_size"]},
        **{"layer_norm_eps": 1e-6, "hidden_act": "gelu", "patch_size": 16, "qkv_bias": True},
        **{"use_abs_pos": True, "use_rel_pos": True},
    }
    only(sam, fixed, "sam_config")
    only(encoder, {"hidden_act": "silu", "use_sliding_window": False}, "encoder_config")
    towers = {
        SAM: {
            "layers": sam["num_hidden_layers"],
            "width": sam["hidden_size"],
            "heads": sam["num_attention_heads"],
            "global_attn_indexes": sam["global_attn_indexes"],
            "downsample_channels": sam["downsample_channels"],
        },
        ENCODER: {
            "layers": encoder["num_hidden_layers"],
            "width": encoder["hidden_size"],
            "heads": encoder["num_attention_heads"],
            "key_heads": encoder["num_key_value_heads"],
            "mlp_width": encoder["intermediate_size"],
            "epsilon": encoder["rms_norm_eps"],
            "theta": rope_theta(encoder),
        },
    }
    processor = source.image_processor(HALVES)
    return ocr2(source, processor, sam["image_size"], towers, source.text_width)


def ocr2(
    source: ModelSource, processor: Json, pixels: int, towers: Mapping[str, Json], width: int
) -> ModelSpec:
    only(processor, {"tile_size": CROP_PIXELS, "crop_to_patches": True}, "the image processor")
    if {side(pixels), side(processor.get("size") or pixels)} != {IMAGE_PIXELS}:
        raise ValueError(f"size of the image processor: only {IMAGE_PIXELS} is supported")
    crops = StretchedTiles(
        tile_pixels=CROP_PIXELS,
        patch_size=16,
        merge_size=4,
        max_tiles=int(processor.get("max_patches") or 6),
        min_tiles=int(processor.get("min_patches") or 2),
    )
    vision = {"image_size": IMAGE_PIXELS, "width": towers}
    sizing = PlainCrops(IMAGE_PIXELS, crops)
    return source.spec("deepseek_ocr2", processor, vision, sizing, width, paths=PATHS)


MODEL_TYPES = {"deepseek_ocr2": deepseek_ocr2}
