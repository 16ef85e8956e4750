"""Gemma 3 with images, each of which is one tile: transformers.models.gemma3."""

from __future__ import annotations

import math
from collections.abc import Mapping

from actors.options import ModelOptions
from actors.spec.checkpoint import Files, Json
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import HALVES, Reader, image_processor, image_spec, only, tile_sides
from actors.spec.tiles import StretchedTiles


def gemma3(options: ModelOptions, files: Files, config: Json) -> ModelSpec:
    vision, processor = config["vision_config"], image_processor(files, "bilinear")
    only(vision, {"hidden_act": "gelu_pytorch_tanh"}, "vision_config")
    only(processor, {"do_pan_and_scan": False}, "the image processor")
    side_patches = int(vision["image_size"]) // int(vision["patch_size"])
    merge = side_patches // math.isqrt(config.get("mm_tokens_per_image", 256))
    vision |= {"spatial_merge_size": merge}
    sizing = StretchedTiles(
        **tile_sides(vision, processor), merge_size=merge, min_tiles=1, max_tiles=1
    )
    pixels, width = HALVES | processor, config["text_config"]["hidden_size"]
    return image_spec("gemma3", options, pixels, vision, sizing, width, resample="bilinear")


MODEL_TYPES: Mapping[str, Reader] = {"gemma3": gemma3}
