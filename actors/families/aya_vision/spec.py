"""Aya Vision and Cohere 2 Vision: transformers.models.aya_vision, cohere2_vision."""

from __future__ import annotations

from actors.families.clip.spec import SIGLIP_TOWER, TOWERS
from actors.spec.checkpoint import Json
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import CLIP_PIXELS, ModelSource, only, tile_sides
from actors.spec.tiles import CoveringTiles, StretchedTiles

MLP_WIDTH = 36864  # transformers' default of Cohere 2 Vision's alignment_intermediate_size


def aya_vision(source: ModelSource) -> ModelSpec:
    """The processor always cuts tiles, whatever `crop_to_patches` of its image processor says."""
    config = source.config
    last = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    only(config, last, "config.json")
    projector = {
        "projector_width": config.get("alignment_intermediate_size", source.text_width),
        "projector_epsilon": config.get("adapter_layer_norm_eps", 1e-6),
    }
    return tiled("aya_vision", source, projector, StretchedTiles)


def cohere2_vision(source: ModelSource) -> ModelSpec:
    only(source.image_processor({}), {"crop_to_patches": True}, "the image processor")
    projector = {"projector_width": source.config.get("alignment_intermediate_size", MLP_WIDTH)}
    return tiled("cohere2_vision", source, projector, CoveringTiles)


def tiled(
    family: str, source: ModelSource, projector: Json, kind: type[StretchedTiles]
) -> ModelSpec:
    vision, processor = source.vision, source.image_processor(CLIP_PIXELS)
    only(vision, {"model_type": SIGLIP_TOWER}, "vision_config")
    layers = {"model_type": SIGLIP_TOWER, "used_layers": int(vision["num_hidden_layers"])}
    sizing = kind(
        **tile_sides(vision, processor),
        merge_size=int(source.config.get("downsample_factor", 2)),
        min_tiles=int(processor.get("min_patches", 1)),
        max_tiles=int(processor.get("max_patches", 12)),
    )
    vision = vision | layers | projector
    return source.spec(family, processor, vision, sizing, source.text_width, folder="aya_vision")


MODEL_TYPES = {"aya_vision": aya_vision, "cohere2_vision": cohere2_vision}
VISION_DEFAULTS = dict.fromkeys(MODEL_TYPES, TOWERS[SIGLIP_TOWER])
