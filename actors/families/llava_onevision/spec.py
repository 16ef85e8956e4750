"""LLaVA-OneVision over SigLIP: transformers.models.llava_onevision, and its own code's names."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from actors.families.clip.spec import SIGLIP_TOWER, TOWERS
from actors.spec.checkpoint import Json
from actors.spec.model_spec import ModelSpec
from actors.spec.sampling import Evenly
from actors.spec.settings import CLIP_PIXELS, HALVES, ModelSource, only, side, tower_pixels
from actors.spec.tiles import AnyresSizing
from actors.spec.video import PooledFrames

FRAMES = 32  # default number of frames of a video, as in LLaVA-OneVision's own code

ONEVISION: Json = TOWERS[SIGLIP_TOWER] | {
    **{"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 26},
    **{"num_attention_heads": 16, "image_size": 384, "patch_size": 14},
}
"""transformers' tower for a config.json without `vision_config`: SigLIP so400m, one layer fewer."""

QWEN_TOWERS: Mapping[str, Json] = {"google/siglip-so400m-patch14-384": ONEVISION}
"""`vision_config` by `mm_vision_tower`, for checkpoints that have none."""


def llava_onevision(source: ModelSource) -> ModelSpec:
    config, processor = source.config, source.image_processor(CLIP_PIXELS)
    last = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    only(config, last | {"projector_hidden_act": "gelu"}, "config.json")
    vision = source.vision if "vision_config" in config else ONEVISION
    only(vision, {"model_type": SIGLIP_TOWER}, "vision_config")
    bias = config.get("multimodal_projector_bias", True)
    vision |= {"model_type": SIGLIP_TOWER, "projector_bias": bias}
    aspect = config.get("vision_aspect_ratio", "anyres_max_9")
    sizing = anyres(vision, processor, pinpoints_of(source, processor), aspect)
    return tiled("llava_onevision", source, processor, vision, sizing, source.text_width)


def llava_qwen(source: ModelSource) -> ModelSpec:
    """lmms-lab/llava-onevision-qwen2-*, of `model_type` llava, whose reader calls this one."""
    config = source.config
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
    sizing = anyres(vision, HALVES, config["image_grid_pinpoints"], config["image_aspect_ratio"])
    return tiled("llava_qwen", source, HALVES, vision, sizing, config["hidden_size"])


def pinpoints_of(source: ModelSource, processor: Json) -> list[list[int]] | None:
    grids = [one.get("image_grid_pinpoints") for one in (processor, source.config)]
    pinpoints: list[list[int]] | None = grids[0] or grids[1]
    if grids[1] and grids[1] != pinpoints:
        raise ValueError("image_grid_pinpoints: config.json and the image processor differ")
    return pinpoints


def anyres(
    vision: Json, processor: Json, pinpoints: list[list[int]] | None, aspect: str = ""
) -> AnyresSizing:
    """`pinpoints`: heights and widths of canvases, in pixels. Without `aspect` no canvas is scaled
    down."""
    size = processor.get("size")
    if isinstance(size, dict) and "shortest_edge" in size:  # a square in this form, too
        size = size["shortest_edge"]
    patch, pixels = side(vision["patch_size"]), tower_pixels(vision, size)
    whole = [pixels * tiles for tiles in range(1, 7)]
    canvases = pinpoints or [list(canvas) for canvas in product(whole, whole)]
    if any(edge % pixels or edge <= 0 for canvas in canvases for edge in canvas):
        raise ValueError(f"image_grid_pinpoints: only whole tiles of {pixels} are supported")
    layouts = tuple((height // pixels, across // pixels) for height, across in canvases)
    max_tiles = max(rows * columns for rows, columns in layouts)
    before, _, most = str(aspect or f"anyres_max_{max_tiles}").partition("anyres_max_")
    if before or not most.isdecimal() or not int(most):
        raise ValueError(f"vision_aspect_ratio: {aspect!r} is no anyres_max_N")
    return AnyresSizing(
        tile_pixels=pixels // patch * patch,
        patch_size=patch,
        merge_size=1,
        max_tiles=max_tiles,
        picture_pixels=pixels,
        canvases=layouts,
        most_tiles=int(most),
    )


def tiled(
    family: str,
    source: ModelSource,
    processor: Json,
    vision: Json,
    sizing: AnyresSizing,
    width: int,
) -> ModelSpec:
    """With videos. The model's own processor does not sample frames by default."""
    vision |= {"used_layers": int(vision["num_hidden_layers"])}
    model = source.spec(family, processor, vision, sizing, width, folder="llava_onevision")
    settings, pixels = source.video_processor(), sizing.picture_pixels
    only(settings, {"fps": None}, "the video processor")
    if side(settings.get("size") or pixels) != pixels:
        raise ValueError(f"size of the video processor: only the tower's {pixels} is supported")
    rule = Evenly(int(settings.get("num_frames") or FRAMES))
    video = PooledFrames(rule, sizing.patch_size, 1, 1, picture_pixels=pixels)
    return source.with_video(model, video)


MODEL_TYPES = {"llava_onevision": llava_onevision}
VISION_DEFAULTS = {"llava_onevision": TOWERS[SIGLIP_TOWER]}
