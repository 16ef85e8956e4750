"""InternVL 2 to 3.5: transformers.models.internvl, and the first repositories' internvl_chat."""

from __future__ import annotations

from collections.abc import Mapping

from actors.options import ModelOptions
from actors.spec.checkpoint import Files, Json
from actors.spec.model_spec import ModelSpec
from actors.spec.sampling import Middles
from actors.spec.settings import (
    IMAGENET_PIXELS,
    Reader,
    image_processor,
    image_spec,
    only,
    tile_sides,
    video_processor,
    with_video,
)
from actors.spec.tiles import StretchedTiles
from actors.spec.video import FrameTiles

FRAMES = 8  # default number of frames of a video, as in InternVL's model cards


def internvl(options: ModelOptions, files: Files, config: Json) -> ModelSpec:
    """Checkpoints with transformers' names."""
    vision, processor = config["vision_config"], image_processor(files)
    pooled = {"use_mean_pooling": True, "use_absolute_position_embeddings": True}
    only(vision, pooled, "vision_config")
    last = {"vision_feature_layer": -1, "vision_feature_select_strategy": "default"}
    only(config, last | {"projector_hidden_act": "gelu"}, "config.json")
    sizing = StretchedTiles(
        **tile_sides(vision, processor),
        merge_size=round(1 / config["downsample_ratio"]),
        min_tiles=int(processor.get("min_patches", 1)),
        max_tiles=int(processor.get("max_patches", 12)),
    )
    width = config["text_config"]["hidden_size"]
    return tiled("internvl", options, files, vision, processor, sizing, width)


def internvl_chat(options: ModelOptions, files: Files, config: Json) -> ModelSpec:
    """Checkpoints with the names of OpenGVLab/InternVL's own code."""
    vision, processor = config["vision_config"], image_processor(files)
    defaults = {"ps_version": "v1", "dynamic_image_size": False, "use_thumbnail": False}
    dynamic = {"ps_version": "v2", "dynamic_image_size": True, "use_thumbnail": True}
    only(defaults | config, dynamic | {"select_layer": -1}, "config.json")
    sizing = StretchedTiles(
        **tile_sides(vision, processor),
        merge_size=round(1 / config.get("downsample_ratio", 0.5)),
        min_tiles=int(config.get("min_dynamic_patch", 1)),
        max_tiles=int(config.get("max_dynamic_patch", 6)),
    )
    width = config["llm_config"]["hidden_size"]
    return tiled("internvl_chat", options, files, vision, processor, sizing, width)


def tiled(
    family: str,
    options: ModelOptions,
    files: Files,
    vision: Json,
    processor: Json,
    sizing: StretchedTiles,
    width: int,
) -> ModelSpec:
    """With videos as in transformers' InternVLVideoProcessor: each frame is one tile."""
    pixels = IMAGENET_PIXELS | processor
    model = image_spec(family, options, pixels, vision, sizing, width, folder="internvl")
    settings = video_processor(files)
    video = FrameTiles(
        Middles(int(settings.get("num_frames") or FRAMES)),
        *(sizing.patch_size, sizing.merge_size, 1),
        tile_pixels=sizing.tile_pixels,
    )
    return with_video(model, settings, video)


MODEL_TYPES: Mapping[str, Reader] = {"internvl": internvl, "internvl_chat": internvl_chat}
