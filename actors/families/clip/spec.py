"""CLIP and SigLIP on their own, every image as one tile: transformers.models.clip, siglip."""

from __future__ import annotations

from collections.abc import Mapping

from actors.spec.checkpoint import Json
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import (
    CLIP_PIXELS,
    HALVES,
    ModelSource,
    only,
    shorter_side,
    side,
    tower_pixels,
)
from actors.spec.tiles import OneTile

SIGLIP_TOWER, CLIP_TOWER = "siglip_vision_model", "clip_vision_model"

BASE: Json = {
    **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12},
    **{"num_attention_heads": 12, "image_size": 224},
}
TOWERS: Mapping[str, Json] = {
    SIGLIP_TOWER: BASE
    | {"patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
    CLIP_TOWER: BASE | {"patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
}
"""transformers' defaults for keys that `vision_config` lacks, by its own `model_type`."""


def siglip(source: ModelSource) -> ModelSpec:
    """Rows of the last hidden state, not pooled."""
    return alone("siglip", SIGLIP_TOWER, source, class_tokens=0)


def clip(source: ModelSource) -> ModelSpec:
    """Rows of the last hidden state, that of the class token first."""
    return alone("clip", CLIP_TOWER, source, class_tokens=1)


def alone(family: str, kind: str, source: ModelSource, class_tokens: int) -> ModelSpec:
    """A tower without a language model: all of its layers, no projector."""
    vision = source.vision | {"model_type": kind}
    vision |= {"used_layers": vision["num_hidden_layers"]}
    return one_tile(family, "clip", source, vision, vision["hidden_size"], class_tokens)


def one_tile(
    family: str, folder: str, source: ModelSource, vision: Json, width: int, class_tokens: int
) -> ModelSpec:
    """The spec of a tower whose images are divided as by CLIP's or SigLIP's processor."""
    cropped = vision["model_type"] == CLIP_TOWER
    processor = source.image_processor(CLIP_PIXELS if cropped else HALVES)
    size = processor.get("size")
    if cropped:
        only(processor, {"do_center_crop": True}, "the image processor")
        size = shorter_side(size)
        pixels = side(vision["image_size"])
        if side(processor.get("crop_size") or pixels) != pixels:
            raise ValueError(f"crop_size of the image processor: only {pixels} is supported")
    patch, pixels = side(vision["patch_size"]), tower_pixels(vision, size)
    sizing = OneTile(
        tile_pixels=pixels // patch * patch,
        patch_size=patch,
        merge_size=1,
        max_tiles=1,
        picture_pixels=pixels,
        cropped=cropped,
        class_tokens=class_tokens,
    )
    return source.spec(family, processor, vision, sizing, width, folder=folder)


MODEL_TYPES = {"siglip": siglip, "clip": clip}
VISION_DEFAULTS = {"siglip": TOWERS[SIGLIP_TOWER], "clip": TOWERS[CLIP_TOWER]}

REFUSED = {
    "siglip2": "its positions are resampled with antialiasing to the size of each image (NaFlex)",
    "lfm2_vl": "its tiles and its overview differ in size, over SigLIP 2 with NaFlex",
}
