"""Llama 4, Scout and Maverick: transformers.models.llama4."""

from __future__ import annotations

from collections.abc import Mapping

from actors.spec.checkpoint import Json
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import HALVES, ModelSource, only, tile_sides
from actors.spec.tiles import PaddedTiles

WIDTHS = ("projector_input_dim", "projector_output_dim", "vision_output_dim")


def llama4(source: ModelSource) -> ModelSpec:
    vision, processor = source.vision, source.image_processor(HALVES, "bilinear")
    only(vision, {"multi_modal_projector_bias": False}, "vision_config")
    only(processor, {"resize_to_max_canvas": False}, "the image processor")
    widths = {int(vision[key]) for key in WIDTHS}
    if len(widths) != 1:
        raise ValueError(f"{', '.join(WIDTHS)}: one width is supported, not {sorted(widths)}")
    sizing = PaddedTiles(
        **tile_sides(vision, processor),
        merge_size=round(1 / vision["pixel_shuffle_ratio"]),
        max_tiles=int(processor.get("max_patches", 16)),
    )
    return source.spec("llama4", processor, vision, sizing, source.text_width, resample="bilinear")


MODEL_TYPES = {"llama4": llama4}
VISION_DEFAULTS: Mapping[str, Json] = {
    "llama4": {
        **{"num_hidden_layers": 34, "hidden_size": 768, "intermediate_size": 5632},
        **{"num_attention_heads": 16, "image_size": 448, "patch_size": 14, "hidden_act": "gelu"},
        **{"pixel_shuffle_ratio": 0.5, "vision_output_dim": 7680},
        **{"projector_input_dim": 4096, "projector_output_dim": 4096},
    }
}
