"""Llama 4, Scout and Maverick: transformers.models.llama4."""

from __future__ import annotations

from collections.abc import Mapping

from actors.options import ModelOptions
from actors.spec.checkpoint import Files, Json
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import HALVES, Reader, image_processor, image_spec, only, tile_sides
from actors.spec.tiles import PaddedTiles


def llama4(options: ModelOptions, files: Files, config: Json) -> ModelSpec:
    vision, processor = config["vision_config"], image_processor(files, "bilinear")
    only(vision, {"multi_modal_projector_bias": False}, "vision_config")
    only(processor, {"resize_to_max_canvas": False}, "the image processor")
    sizing = PaddedTiles(
        **tile_sides(vision, processor),
        merge_size=round(1 / vision["pixel_shuffle_ratio"]),
        max_tiles=int(processor.get("max_patches", 16)),
    )
    pixels, width = HALVES | processor, config["text_config"]["hidden_size"]
    return image_spec("llama4", options, pixels, vision, sizing, width, resample="bilinear")


MODEL_TYPES: Mapping[str, Reader] = {"llama4": llama4}
