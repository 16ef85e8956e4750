"""The configurations of CLIP, SigLIP and LLaVA: a function each, from config.json to a ModelSpec.

Every image is one tile. What a tower or its preprocessing does not do is refused here, by the key
that asks for it. Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Callable

from actors.checkpoint import Files, Json
from actors.options import ModelOptions
from actors.packed_spec import CLIP_MEAN, CLIP_STD, pixtral
from actors.spec import ModelSpec, image_processor, image_spec, only
from actors.tile_spec import HALVES, side
from actors.tiling import OneTile

SIGLIP_TOWER, CLIP_TOWER = "siglip_vision_model", "clip_vision_model"

DEFAULTS: dict[str, Json] = {
    SIGLIP_TOWER: {
        **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12},
        **{"num_attention_heads": 12, "image_size": 224, "patch_size": 16},
        **{"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
    },
    CLIP_TOWER: {
        **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12},
        **{"num_attention_heads": 12, "image_size": 224, "patch_size": 32},
        **{"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
    },
}
"""What transformers takes for keys that `vision_config` leaves out, by its `model_type`."""

LLAMA_WIDTH = 4096
"""And for the width of a language model that does not say."""


def siglip(options: ModelOptions, files: Files, config: Json) -> ModelSpec:
    """SigLIP: rows of the last hidden state, not pooled: transformers.models.siglip."""
    return alone("siglip", SIGLIP_TOWER, options, files, config)


def clip(options: ModelOptions, files: Files, config: Json) -> ModelSpec:
    """CLIP: rows of the last hidden state, that of the class first: transformers.models.clip."""
    return alone("clip", CLIP_TOWER, options, files, config, class_tokens=1)


def alone(
    family: str,
    kind: str,
    options: ModelOptions,
    files: Files,
    config: Json,
    *,
    class_tokens: int = 0,
) -> ModelSpec:
    """A tower without a language model behind it: all of its layers, no projector."""
    vision = DEFAULTS[kind] | config["vision_config"] | {"model_type": kind}
    vision |= {"used_layers": vision["num_hidden_layers"]}
    return pictured(family, options, files, vision, vision["hidden_size"], class_tokens)


def llava(options: ModelOptions, files: Files, config: Json) -> ModelSpec:
    """LLaVA 1.5 and its kin, over CLIP, SigLIP or Pixtral's tower: transformers.models.llava."""
    only(config, {"projector_hidden_act": "gelu"}, "config.json")
    kind = config["vision_config"].get("model_type")
    if kind == "pixtral":
        return pixtral(options, files, config)
    if kind not in DEFAULTS:
        towers = ", ".join([*DEFAULTS, "pixtral"])
        raise ValueError(f"model_type of vision_config: {kind!r} is none of {towers}")
    vision = DEFAULTS[kind] | config["vision_config"]
    layer, depth = config.get("vision_feature_layer", -2), int(vision["num_hidden_layers"])
    used = layer + (depth + 1 if layer < 0 else 0)
    strategy = config.get("vision_feature_select_strategy", "default")
    if kind == SIGLIP_TOWER and strategy != "full":
        raise ValueError("vision_feature_select_strategy: SigLIP has no class to drop, only full")
    if kind == SIGLIP_TOWER and used == depth:
        raise ValueError(
            "vision_feature_layer: of SigLIP only layers before the last are supported"
        )
    bias = config.get("multimodal_projector_bias", True)
    vision |= {"used_layers": used, "projector_bias": bias}
    width = config["text_config"].get("hidden_size", LLAMA_WIDTH)
    classes = int(kind == CLIP_TOWER and strategy == "full")
    return pictured("llava", options, files, vision, width, classes)


def pictured(
    family: str,
    options: ModelOptions,
    files: Files,
    vision: Json,
    width: int,
    class_tokens: int,
) -> ModelSpec:
    """The spec of a tower whose images are cut as CLIP's or SigLIP's processor does it."""
    processor = image_processor(files)
    patch, pixels = side(vision["patch_size"]), side(vision["image_size"])
    cropped = vision["model_type"] == CLIP_TOWER
    asked = processor.get("size") or pixels
    if cropped:
        only(processor, {"do_center_crop": True}, "the image processor")
        if isinstance(asked, dict) and set(asked) == {"shortest_edge"}:
            asked = asked["shortest_edge"]
        if side(processor.get("crop_size") or pixels) != pixels:
            raise ValueError(f"crop_size of the image processor: only {pixels} is supported")
    if side(asked) != pixels:
        raise ValueError(f"size of the image processor: only the tower's {pixels} is supported")
    sizing = OneTile(
        tile_pixels=pixels // patch * patch,
        patch_size=patch,
        merge_size=1,
        max_tiles=1,
        picture_pixels=pixels,
        cropped=cropped,
        class_tokens=class_tokens,
    )
    means = {"image_mean": CLIP_MEAN, "image_std": CLIP_STD} if cropped else HALVES
    vision |= {"spatial_merge_size": 1}
    return image_spec(family, options, means | processor, vision, sizing, width)


FAMILIES: dict[str, Callable[[ModelOptions, Files, Json], ModelSpec]] = {
    "siglip": siglip,
    "clip": clip,
    "llava": llava,
}
