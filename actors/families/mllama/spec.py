"""Llama 3.2 Vision: transformers.models.mllama."""

from __future__ import annotations

from actors.spec.checkpoint import Json
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import HALVES, ModelSource, only, tile_sides
from actors.spec.tiles import FilledTiles


def mllama(source: ModelSource) -> ModelSpec:
    """Rows are what cross-attention layers of the language model read of the image."""
    vision, processor = source.vision, source.image_processor(HALVES, "bilinear")
    tiles, taps = int(vision["max_num_tiles"]), list(vision["intermediate_layers_indices"])
    only(processor, {"max_image_tiles": tiles, "do_pad": True}, "the image processor")
    sizing = FilledTiles(**tile_sides(vision, processor), merge_size=1, max_tiles=tiles)
    fixed: Json = {
        "hidden_act": "gelu",
        "intermediate_layers_indices": sorted(set(taps)),
        "supported_aspect_ratios": [list(one) for one in sizing.aspects],
        "vision_output_dim": (1 + len(taps)) * vision["hidden_size"],
    }
    only(vision, fixed, "vision_config")
    return source.spec("mllama", processor, vision, sizing, source.text_width, resample="bilinear")


MODEL_TYPES = {"mllama": mllama}
VISION_DEFAULTS: dict[str, Json] = {
    "mllama": {
        **{"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32},
        **{"num_global_layers": 8, "attention_heads": 16, "image_size": 448, "patch_size": 14},
        **{"norm_eps": 1e-5, "hidden_act": "gelu", "max_num_tiles": 4},
        "intermediate_layers_indices": [3, 7, 15, 23, 30],
    }
}
