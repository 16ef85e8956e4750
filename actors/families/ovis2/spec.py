"""Ovis 2, as converted to transformers' format: transformers.models.ovis2."""

from __future__ import annotations

from actors.spec.model_spec import ModelSpec
from actors.spec.settings import CLIP_PIXELS, ModelSource, only, tile_sides
from actors.spec.tiles import PartitionedTiles

WIDTH = 1536
"""transformers' default of `hidden_size`, the width of the table of visual words."""


def ovis2(source: ModelSource) -> ModelSpec:
    vision, processor = source.vision, source.image_processor(CLIP_PIXELS)
    only(vision, {"hidden_act": "silu", "tokenize_function": "softmax"}, "vision_config")
    only(
        processor, {"use_covering_area_grid": True, "do_center_crop": False}, "the image processor"
    )
    cut = processor.get("crop_to_patches", False)
    sizing = PartitionedTiles(
        **tile_sides(vision, processor),
        merge_size=int(vision["hidden_stride"]),
        max_tiles=int(processor.get("max_patches", 12)) if cut else 1,
    )
    if sizing.side_patches % sizing.merge_size:
        raise ValueError(
            f"hidden_stride of vision_config: {sizing.merge_size} does not divide the "
            f"{sizing.side_patches} patches per side of a tile"
        )
    width = source.config.get("hidden_size", WIDTH)
    return source.spec("ovis2", processor, vision, sizing, width)


MODEL_TYPES = {"ovis2": ovis2}
VISION_DEFAULTS = {
    "ovis2": {
        **{"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24},
        **{"num_attention_heads": 8, "image_size": 224, "patch_size": 14, "rms_norm_eps": 1e-5},
        **{"qkv_bias": False, "mlp_bias": False, "hidden_act": "silu", "hidden_stride": 1},
        **{"vocab_size": 16384, "num_visual_indicator_tokens": 5},
        "tokenize_function": "softmax",
    }
}

REFUSED = {
    "ovis": "its files are for code of its own: take those converted to transformers (-hf)",
    "ovis2_5": "its tower is another: SigLIP 2 with rotary positions and windows",
}
