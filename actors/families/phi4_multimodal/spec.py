"""Phi-4-multimodal, images only: transformers.models.phi4_multimodal, and its own code's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from actors.errors import CheckpointError
from actors.spec.checkpoint import Json
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import HALVES, ModelSource, layers_run, only, side, tower_pixels
from actors.spec.slices import PaddedCrops

MERGE = 2
"""Patches are averaged, 2 x 2 to one."""


def phi4_multimodal(source: ModelSource) -> ModelSpec:
    """Images are resized bilinearly, and once more to the square of the whole image."""
    if source.options.tower == "audio":
        raise CheckpointError(
            f"model.tower is audio, but the audio encoder of {source.options.id!r} is not served: "
            "it is a conformer with relative positions. The nearest that is served is qwen2_audio"
        )
    vision, processor = source.vision, source.image_processor(HALVES)
    patch, pixels = side(vision["patch_size"]), tower_pixels(vision, processor.get("size"))
    only(vision, {"hidden_act": "gelu_pytorch_tanh", "crop_size": pixels}, "vision_config")
    only(processor, {"patch_size": patch}, "the image processor")
    if pixels % (patch * MERGE):
        raise ValueError("patch_size of vision_config: only even numbers of patches are supported")
    depth, layer = int(vision["num_hidden_layers"]), int(vision["feature_layer"])
    (used,) = layers_run(layer, depth, "feature_layer")
    sizing = PaddedCrops(
        patch_size=patch,
        merge_size=MERGE,
        picture_pixels=pixels,
        max_crops=int(processor.get("dynamic_hd") or 36),
    )
    family, width = source.config["model_type"], source.config["hidden_size"]
    vision |= {"used_layers": used}
    return source.spec(
        *(family, processor, vision, sizing, width), folder="phi4_multimodal", resample="bilinear"
    )


def phi4mm(source: ModelSource) -> ModelSpec:
    """microsoft/Phi-4-multimodal-instruct as published: its own code knows the tower's sizes."""
    given = source.config["embd_layer"]["image_embd_layer"]
    fixed = {
        **{"embedding_cls": "tune_image", "hd_transform_order": "sub_glb"},
        **{"image_token_compression_cls": "avg_pool_2d", "projection_cls": "mlp"},
        **{"use_hd_transform": True, "with_learnable_separator": True},
    }
    only(given, fixed, "image_embd_layer")
    only(source.config, {"img_processor": None}, "config.json")
    vision = {"crop_size": given["crop_size"]}
    return phi4_multimodal(replace(source, config=source.config | {"vision_config": vision}))


MODEL_TYPES = {"phi4_multimodal": phi4_multimodal, "phi4mm": phi4mm}
REFUSED = {"phi3_v": "its files are for code of its own, which transformers does not have"}
TOWER: Json = {
    **{"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27},
    **{"num_attention_heads": 16, "image_size": 448, "patch_size": 14, "crop_size": 448},
    **{"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "feature_layer": -2},
}
VISION_DEFAULTS: Mapping[str, Json] = dict.fromkeys(MODEL_TYPES, TOWER)
