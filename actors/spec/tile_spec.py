"""The tile families' configurations: a function each, from config.json to a ModelSpec.

What a tower or its preprocessing does not do is refused here, by the key that asks for it. Knows
nothing of torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from actors.options import ModelOptions
from actors.spec.checkpoint import Files, Json
from actors.spec.model_spec import BILINEAR, ModelSpec, image_processor, image_spec, only, side
from actors.spec.tiling import PaddedTiles, StretchedTiles, TileSizing
from actors.spec.video_spec import tiled_video

IMAGENET_MEAN, IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
HALVES = {"image_mean": 0.5, "image_std": 0.5}


def internvl(options: ModelOptions, files: Files, config: Json) -> ModelSpec:
    """InternVL 2 to 3.5 under transformers' names: transformers.models.internvl."""
    vision, processor = config["vision_config"], image_processor(files)
    pooled = {"use_mean_pooling": True, "use_absolute_position_embeddings": True}
    only(vision, pooled, "vision_config")
    last = {"vision_feature_layer": -1, "vision_feature_select_strategy": "default"}
    only(config, last | {"projector_hidden_act": "gelu"}, "config.json")
    sizing = StretchedTiles(
        **tile(vision, processor, config["downsample_ratio"]),
        min_tiles=int(processor.get("min_patches", 1)),
        max_tiles=int(processor.get("max_patches", 12)),
    )
    width = config["text_config"]["hidden_size"]
    return tiled_video(tiled("internvl", options, processor, vision, sizing, width), files)


def internvl_chat(options: ModelOptions, files: Files, config: Json) -> ModelSpec:
    """InternVL 2 to 3.5 under the names of its own code: OpenGVLab/InternVL, internvl_chat."""
    vision, processor = config["vision_config"], image_processor(files)
    defaults = {"ps_version": "v1", "dynamic_image_size": False, "use_thumbnail": False}
    dynamic = {"ps_version": "v2", "dynamic_image_size": True, "use_thumbnail": True}
    only(defaults | config, dynamic | {"select_layer": -1}, "config.json")
    sizing = StretchedTiles(
        **tile(vision, processor, config.get("downsample_ratio", 0.5)),
        min_tiles=int(config.get("min_dynamic_patch", 1)),
        max_tiles=int(config.get("max_dynamic_patch", 6)),
    )
    width = config["llm_config"]["hidden_size"]
    return tiled_video(tiled("internvl_chat", options, processor, vision, sizing, width), files)


def llama4(options: ModelOptions, files: Files, config: Json) -> ModelSpec:
    """Llama 4, Scout and Maverick: transformers.models.llama4."""
    vision, processor = config["vision_config"], image_processor(files, BILINEAR)
    only(vision, {"multi_modal_projector_bias": False}, "vision_config")
    only(processor, {"resize_to_max_canvas": False}, "the image processor")
    sizing = PaddedTiles(
        **tile(vision, processor, vision["pixel_shuffle_ratio"]),
        max_tiles=int(processor.get("max_patches", 16)),
    )
    width = config["text_config"]["hidden_size"]
    return tiled("llama4", options, HALVES | processor, vision, sizing, width)


def gemma3(options: ModelOptions, files: Files, config: Json) -> ModelSpec:
    """Gemma 3 with images: transformers.models.gemma3. Every image is one tile."""
    vision, processor = config["vision_config"], image_processor(files, BILINEAR)
    only(vision, {"hidden_act": "gelu_pytorch_tanh"}, "vision_config")
    only(processor, {"do_pan_and_scan": False}, "the image processor")
    side_patches = int(vision["image_size"]) // int(vision["patch_size"])
    merge = side_patches // math.isqrt(config.get("mm_tokens_per_image", 256))
    vision |= {"spatial_merge_size": merge}
    one = StretchedTiles(**tile(vision, processor, 1 / merge), min_tiles=1, max_tiles=1)
    width = config["text_config"]["hidden_size"]
    return tiled("gemma3", options, HALVES | processor, vision, one, width)


def tiled(
    family: str,
    options: ModelOptions,
    processor: Json,
    vision: Json,
    sizing: TileSizing,
    width: int,
) -> ModelSpec:
    """The spec of a tile family."""
    defaults = {"image_mean": IMAGENET_MEAN, "image_std": IMAGENET_STD}
    return image_spec(family, options, defaults | processor, vision, sizing, width)


def tile(vision: Json, processor: Json, shuffle_ratio: float) -> dict[str, int]:
    """What TileSizing says of a tile."""
    pixels, patch = side(vision["image_size"]), side(vision["patch_size"])
    if side(processor.get("size", pixels)) != pixels:
        raise ValueError(f"size of the image processor: only the tower's {pixels} is supported")
    return {
        "tile_pixels": pixels,
        "patch_size": patch,
        "merge_size": round(1 / shuffle_ratio),
    }


FAMILIES: dict[str, Callable[[ModelOptions, Files, Json], ModelSpec]] = {
    "internvl": internvl,
    "internvl_chat": internvl_chat,
    "llama4": llama4,
    "gemma3": gemma3,
}
