"""Pixtral (as a tower of transformers.models.llava), Mistral 3 and LightOnOCR.

transformers.models.mistral3 and lighton_ocr. LightOnOCR is published as either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from actors.spec.checkpoint import Json
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import CLIP_PIXELS, ModelSource, only
from actors.spec.sizing import FittedSizing

PIXTRAL: Json = {
    **{"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24},
    **{"num_attention_heads": 16, "image_size": 1024, "patch_size": 16, "hidden_act": "gelu"},
}


def pixtral(source: ModelSource) -> ModelSpec:
    """Of `model_type` llava, whose reader calls this one."""
    config = source.config
    strategy = config.get("vision_feature_select_strategy", "default")
    if strategy != "full" or config.get("vision_feature_layer", -2) != -1:
        raise ValueError(
            "vision_feature_select_strategy, vision_feature_layer: of Pixtral only full and -1 "
            "are supported"
        )
    bias = config.get("multimodal_projector_bias", True)
    source = replace(source, vision_defaults=PIXTRAL)
    return fitted("pixtral", source, {"projector_bias": bias}, merge=1)


def mistral3(source: ModelSource) -> ModelSpec:
    config = source.config
    only(config, {"vision_feature_layer": -1}, "config.json")
    projector = {
        "projector_bias": config.get("multimodal_projector_bias", False),
        "projector_epsilon": config["text_config"].get("rms_norm_eps", 1e-6),
    }
    return fitted("mistral3", source, projector, config.get("spatial_merge_size", 2))


def lighton_ocr(source: ModelSource) -> ModelSpec:
    epsilon = source.config["text_config"].get("rms_norm_eps", 1e-6)
    projector = {"projector_bias": False, "projector_epsilon": epsilon}
    return fitted("lighton_ocr", source, projector, source.config.get("spatial_merge_size", 2))


def fitted(family: str, source: ModelSource, projector: Json, merge: int) -> ModelSpec:
    vision, processor = source.vision, source.image_processor(CLIP_PIXELS)
    only(source.config, {"projector_hidden_act": "gelu"}, "config.json")
    only(vision, {"hidden_act": "silu"}, "vision_config")
    size = processor.get("size") or {"longest_edge": vision["image_size"]}
    sizing = FittedSizing(int(vision["patch_size"]), merge, int(size["longest_edge"]))
    return source.spec(
        family, processor, vision | projector, sizing, source.text_width, folder="pixtral"
    )


MODEL_TYPES = {"mistral3": mistral3, "lighton_ocr": lighton_ocr}
VISION_DEFAULTS: Mapping[str, Json] = dict.fromkeys(MODEL_TYPES, PIXTRAL)
