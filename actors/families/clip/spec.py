"""CLIP and SigLIP on their own, every image as one tile: transformers.models.clip, siglip.

Here, as in transformers, SigLIP 2 of a fixed size is a SigLIP; SigLIP 2 with NaFlex is in siglip2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from actors.spec.checkpoint import Json
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import (
    CLIP_PIXELS,
    HALVES,
    ModelSource,
    only,
    resampling,
    shorter_side,
    side,
    tower_pixels,
)
from actors.spec.sizing import NaflexSizing, Resample
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

PROJECTION = 512
"""transformers' default of CLIP's `projection_dim`."""
TEXTS: Mapping[str, Json] = {
    SIGLIP_TOWER: {
        **{"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 3072},
        **{"num_hidden_layers": 12, "num_attention_heads": 12, "max_position_embeddings": 64},
        **{"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
    },
    CLIP_TOWER: {
        **{"vocab_size": 49408, "hidden_size": 512, "intermediate_size": 2048},
        **{"num_hidden_layers": 12, "num_attention_heads": 8, "max_position_embeddings": 77},
        **{"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "eos_token_id": 49407},
    },
}
"""The same for `text_config`."""


def siglip(source: ModelSource) -> ModelSpec:
    """Rows of the last hidden state, or the vector of `get_image_features`."""
    return alone("siglip", SIGLIP_TOWER, source, class_tokens=0)


def clip(source: ModelSource) -> ModelSpec:
    """Rows of the last hidden state, the class token's first, or the projected vector."""
    return alone("clip", CLIP_TOWER, source, class_tokens=1)


def alone(family: str, kind: str, source: ModelSource, class_tokens: int) -> ModelSpec:
    """The spec of a tower without a language model: all of its layers and, with vectors, its
    pooling, projection and text tower."""
    vision = source.vision | {"model_type": kind}
    vision |= {"used_layers": int(vision["num_hidden_layers"])}
    # SigLIP resizes bicubically, SigLIP 2 bilinearly.
    resample: Resample | None = "bicubic" if kind == CLIP_TOWER else None
    width = vision["hidden_size"]
    spec = one_tile(family, "clip", source, vision, width, class_tokens, resample)
    if source.options.output == "rows":
        return spec
    if kind == CLIP_TOWER:
        spec = replace(spec, width=int(source.config.get("projection_dim", PROJECTION)))
    return with_vectors(spec, kind, source)


def with_vectors(spec: ModelSpec, kind: str, source: ModelSource) -> ModelSpec:
    """The spec with vectors of `spec.width` values, also of texts if there is a text tower. `kind`:
    the `model_type` of the tower, which decides on the defaults of `text_config`."""
    assert isinstance(spec.sizing, OneTile | NaflexSizing)
    if kind == SIGLIP_TOWER:
        only(source.vision, {"vision_use_head": True}, "vision_config, for model.output vector")
    if text := source.config.get("text_config"):
        text = TEXTS[kind] | text
        values = text.get("projection_size") or text["hidden_size"]
        if kind == SIGLIP_TOWER and values != spec.width:
            raise ValueError(
                f"projection_size of text_config: {values}, where images give {spec.width} values"
            )
    paths = ("default", "text") if text else ("default",)
    sizing = replace(spec.sizing, pooled=True, paths=len(paths))
    return replace(spec, sizing=sizing, vector=True, text=text, paths=paths)


def one_tile(
    family: str,
    folder: str,
    source: ModelSource,
    vision: Json,
    width: int,
    class_tokens: int,
    resample: Resample | None = "bicubic",
) -> ModelSpec:
    """The spec of a tower whose images are divided as CLIP's or SigLIP's processor divides them.

    `resample`: None: that of the processor.
    """
    cropped = vision["model_type"] == CLIP_TOWER
    processor = source.image_processor(CLIP_PIXELS if cropped else HALVES, resample)
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
    mode = resample or resampling(processor)
    return source.spec(family, processor, vision, sizing, width, folder=folder, resample=mode)


MODEL_TYPES = {"siglip": siglip, "clip": clip}
VISION_DEFAULTS = {"siglip": TOWERS[SIGLIP_TOWER], "clip": TOWERS[CLIP_TOWER]}
