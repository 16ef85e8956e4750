"""Pixtral (as a tower of transformers.models.llava) and Mistral 3: transformers.models.mistral3."""

from __future__ import annotations

from collections.abc import Mapping

from actors.options import ModelOptions
from actors.spec.checkpoint import Files, Json
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import (
    CLIP_PIXELS,
    Reader,
    image_processor,
    image_spec,
    only,
    rope_theta,
)
from actors.spec.sizing import FittedSizing

DEFAULTS: Json = {
    **{"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24},
    **{"num_attention_heads": 16, "image_size": 1024, "patch_size": 16, "hidden_act": "gelu"},
}
"""transformers' defaults for keys that `vision_config` lacks."""


def pixtral(options: ModelOptions, files: Files, config: Json) -> ModelSpec:
    """Of `model_type` llava, whose reader calls this one."""
    strategy = config.get("vision_feature_select_strategy", "default")
    if strategy != "full" or config.get("vision_feature_layer", -2) != -1:
        raise ValueError(
            "vision_feature_select_strategy, vision_feature_layer: of Pixtral only full and -1 "
            "are supported"
        )
    bias = config.get("multimodal_projector_bias", True)
    return fitted("pixtral", options, files, config, {"projector_bias": bias}, merge=1)


def mistral3(options: ModelOptions, files: Files, config: Json) -> ModelSpec:
    only(config, {"vision_feature_layer": -1}, "config.json")
    projector = {
        "projector_bias": config.get("multimodal_projector_bias", False),
        "projector_epsilon": config["text_config"].get("rms_norm_eps", 1e-5),
    }
    merge = config.get("spatial_merge_size", 2)
    return fitted("mistral3", options, files, config, projector, merge)


def fitted(
    family: str, options: ModelOptions, files: Files, config: Json, projector: Json, merge: int
) -> ModelSpec:
    vision, processor = DEFAULTS | config["vision_config"], image_processor(files)
    only(config, {"projector_hidden_act": "gelu"}, "config.json")
    only(vision, {"hidden_act": "silu"}, "vision_config")
    size = processor.get("size") or {"longest_edge": vision["image_size"]}
    vision |= projector | {"spatial_merge_size": merge, "rope_theta": rope_theta(vision)}
    sizing = FittedSizing(int(vision["patch_size"]), merge, int(size["longest_edge"]))
    pixels, width = CLIP_PIXELS | processor, config["text_config"]["hidden_size"]
    return image_spec(family, options, pixels, vision, sizing, width, folder="pixtral")


MODEL_TYPES: Mapping[str, Reader] = {"mistral3": mistral3}
