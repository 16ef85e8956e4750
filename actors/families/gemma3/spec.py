"""Gemma 3 with images, each of which is one tile: transformers.models.gemma3."""

from __future__ import annotations

import math

from actors.families.clip.spec import SIGLIP_TOWER, TOWERS
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import HALVES, ModelSource, only, tile_sides
from actors.spec.tiles import StretchedTiles


def gemma3(source: ModelSource) -> ModelSpec:
    vision, processor = source.vision, source.image_processor(HALVES, "bilinear")
    only(vision, {"hidden_act": "gelu_pytorch_tanh"}, "vision_config")
    only(processor, {"do_pan_and_scan": False}, "the image processor")
    side_patches = int(vision["image_size"]) // int(vision["patch_size"])
    merge = side_patches // math.isqrt(source.config.get("mm_tokens_per_image", 256))
    sizing = StretchedTiles(
        **tile_sides(vision, processor), merge_size=merge, min_tiles=1, max_tiles=1
    )
    return source.spec("gemma3", processor, vision, sizing, source.text_width, resample="bilinear")


MODEL_TYPES = {"gemma3": gemma3}
VISION_DEFAULTS = {"gemma3": TOWERS[SIGLIP_TOWER]}
