"""The configurations of CLIP, SigLIP and LLaVA: a function each, from config.json to a ModelSpec.

Every image is one tile; of LLaVA-OneVision one and those of a canvas. What a tower or its
preprocessing does not do is refused here, by the key that asks for it. Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

from actors.options import ModelOptions
from actors.spec.anyres import AnyresSizing
from actors.spec.checkpoint import Files, Json
from actors.spec.model_spec import ModelSpec, image_processor, image_spec, only, side
from actors.spec.packed_spec import CLIP_MEAN, CLIP_STD, pixtral
from actors.spec.tile_spec import HALVES
from actors.spec.tiling import OneTile
from actors.spec.video_spec import pooled_video

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
    if "mm_vision_tower" in config:
        return llava_qwen(options, files, config)
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


ONEVISION = DEFAULTS[SIGLIP_TOWER] | {
    **{"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 26},
    **{"num_attention_heads": 16, "image_size": 384, "patch_size": 14},
}
"""What transformers takes where LLaVA-OneVision says nothing: SigLIP so400m but its last layer."""

QWEN_TOWERS = {"google/siglip-so400m-patch14-384": ONEVISION}
"""`vision_config` by `mm_vision_tower`, in checkpoints that have none."""


def llava_onevision(options: ModelOptions, files: Files, config: Json) -> ModelSpec:
    """LLaVA-OneVision over SigLIP: transformers.models.llava_onevision."""
    last = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    only(config, last | {"projector_hidden_act": "gelu"}, "config.json")
    vision = ONEVISION | config.get("vision_config", {})
    only(vision, {"model_type": SIGLIP_TOWER}, "vision_config")
    bias = config.get("multimodal_projector_bias", True)
    vision |= {"model_type": SIGLIP_TOWER, "projector_bias": bias}
    processor: Json = {"image_mean": CLIP_MEAN, "image_std": CLIP_STD} | image_processor(files)
    grids = [one.get("image_grid_pinpoints") for one in (processor, config)]
    pinpoints: list[list[int]] | None = grids[0] or grids[1]
    if grids[1] and grids[1] != pinpoints:
        raise ValueError("image_grid_pinpoints: config.json and the image processor differ")
    aspect = config.get("vision_aspect_ratio", "anyres_max_9")
    width = config["text_config"]["hidden_size"]
    return anyres("llava_onevision", options, files, vision, processor, pinpoints, aspect, width)


def llava_qwen(options: ModelOptions, files: Files, config: Json) -> ModelSpec:
    """LLaVA-OneVision under the names of its own code: lmms-lab/llava-onevision-qwen2-*."""
    tower = config["mm_vision_tower"]
    if tower not in QWEN_TOWERS:
        raise ValueError(f"mm_vision_tower: {tower!r} is none of {', '.join(QWEN_TOWERS)}")
    fixed = {
        **{"mm_projector_type": "mlp2x_gelu", "mm_patch_merge_type": "spatial_unpad"},
        **{"mm_newline_position": "one_token", "mm_spatial_pool_mode": "bilinear"},
        **{"mm_vision_select_layer": -2, "mm_vision_select_feature": "patch"},
    }
    only(config, fixed, "config.json")
    vision = QWEN_TOWERS[tower] | {"model_type": SIGLIP_TOWER, "projector_bias": True}
    pinpoints, aspect = config["image_grid_pinpoints"], config["image_aspect_ratio"]
    width = config["hidden_size"]
    return anyres("llava_qwen", options, files, vision, HALVES, pinpoints, aspect, width)


def anyres(
    family: str,
    options: ModelOptions,
    files: Files,
    vision: Json,
    processor: Json,
    pinpoints: list[list[int]] | None,
    aspect: str,
    width: int,
) -> ModelSpec:
    """The spec of LLaVA-OneVision: `pinpoints` are heights and widths of canvases."""
    patch, pixels = side(vision["patch_size"]), side(vision["image_size"])
    if side(processor.get("size") or pixels) != pixels:
        raise ValueError(f"size of the image processor: only the tower's {pixels} is supported")
    whole = [pixels * tiles for tiles in range(1, 7)]
    canvases = pinpoints or [list(canvas) for canvas in product(whole, whole)]
    if any(edge % pixels or edge <= 0 for canvas in canvases for edge in canvas):
        raise ValueError(f"image_grid_pinpoints: only whole tiles of {pixels} are supported")
    before, _, most = str(aspect).partition("anyres_max_")
    if before or not most.isdecimal() or not int(most):
        raise ValueError(f"vision_aspect_ratio: {aspect!r} is no anyres_max_N")
    layouts = tuple((height // pixels, across // pixels) for height, across in canvases)
    sizing = AnyresSizing(
        tile_pixels=pixels // patch * patch,
        patch_size=patch,
        merge_size=1,
        max_tiles=max(rows * columns for rows, columns in layouts),
        picture_pixels=pixels,
        canvases=layouts,
        most_tiles=int(most),
    )
    vision |= {"spatial_merge_size": 1, "used_layers": vision["num_hidden_layers"]}
    return pooled_video(image_spec(family, options, processor, vision, sizing, width), files)


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
    "llava_onevision": llava_onevision,
}
