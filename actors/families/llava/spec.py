"""LLaVA 1.5 and its relatives over CLIP or SigLIP: transformers.models.llava.

Pixtral, and LLaVA-OneVision with the names of its own code, have the same `model_type`.
"""

from __future__ import annotations

from actors.families.clip.spec import CLIP_TOWER, SIGLIP_TOWER, TOWERS, one_tile
from actors.families.llava_onevision.spec import llava_qwen
from actors.families.pixtral.spec import pixtral
from actors.spec.checkpoint import Json
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import ModelSource, layers_run, only


def llava(source: ModelSource) -> ModelSpec:
    config = source.config
    if "mm_vision_tower" in config:
        return llava_qwen(source)
    if source.vision.get("model_type") == "pixtral":
        return pixtral(source)
    vision = used(source)
    only(source.image_processor({}), {"do_pad": False}, "the image processor")
    kind, strategy = vision["model_type"], config.get("vision_feature_select_strategy", "default")
    if kind == SIGLIP_TOWER and strategy != "full":
        raise ValueError("vision_feature_select_strategy: SigLIP has no class to drop, only full")
    class_tokens = int(kind == CLIP_TOWER and strategy == "full")
    return one_tile("llava", "llava", source, vision, source.text_width, class_tokens)


def used(source: ModelSource) -> Json:
    """`vision_config`, with what config.json says of the layers and of the projector."""
    config = source.config
    only(config, {"projector_hidden_act": "gelu"}, "config.json")
    kind: str = source.vision.get("model_type", "")
    if kind not in TOWERS:
        towers = ", ".join([*TOWERS, "pixtral"])
        raise ValueError(f"model_type of vision_config: {kind!r} is none of {towers}")
    vision = TOWERS[kind] | source.vision
    depth, given = int(vision["num_hidden_layers"]), config.get("vision_feature_layer", -2)
    layers = layers_run(given, depth, "vision_feature_layer")
    if layers != sorted(set(layers)):
        raise ValueError(f"vision_feature_layer: {given} is not in ascending order")
    bias = config.get("multimodal_projector_bias", True)
    return vision | {"used_layers": layers[-1], "taps": layers[:-1], "projector_bias": bias}


MODEL_TYPES = {"llava": llava}
