"""The configurations of the families with two paths: from config.json to a ModelSpec.

Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from actors.options import ModelOptions
from actors.spec.checkpoint import Files, Json
from actors.spec.crops import CropSizing
from actors.spec.model_spec import BILINEAR, ModelSpec, image_processor, image_spec, only, side
from actors.spec.packed_spec import CLIP_MEAN, CLIP_STD
from actors.spec.sizing import PATHS
from actors.spec.tiling import StretchedTiles
from actors.spec.windows import PaddedWindows, WindowSizing

STEP_MERGE_SIZE = 4
"""Two convolutions with a stride of 2 each follow the blocks of every Step3 tower."""


def deepseek_ocr(options: ModelOptions, files: Files, config: Json) -> ModelSpec:
    """DeepSeek-OCR: deepseek-ai/DeepSeek-OCR. Of its `model_type` there are towers unlike it.

    `tile_size`, `min_patches` and `max_patches` of the processor are named as transformers names
    them for unlimited_ocr; without them, what the model's own code says: 2 to 9 crops of 640.
    """
    vision, projector = config["vision_config"], config["projector_config"]
    only(vision, {"model_name": "deeplip_b_l"}, "vision_config")
    only(projector, {"projector_type": "linear"}, "projector_config")
    processor = files.read_json("processor_config.json") or {}
    fixed = {"patch_size": 16, "downsample_ratio": 4, "normalize": True}
    only(processor, fixed, "the processor")
    sizing = CropSizing(
        image_pixels=int(vision["image_size"]),
        crops=StretchedTiles(
            tile_pixels=int(processor.get("tile_size", 640)),
            patch_size=16,
            merge_size=4,
            max_tiles=int(processor.get("max_patches", 9)),
            min_tiles=int(processor.get("min_patches", 2)),
        ),
    )
    halves = {"image_mean": 0.5, "image_std": 0.5} | processor
    width = projector["n_embed"]
    return replace(image_spec("deepseek_ocr", options, halves, vision, sizing, width), paths=PATHS)


def step3p7(options: ModelOptions, files: Files, config: Json) -> ModelSpec:
    """Step-3.7, cut as transformers' own processor does: transformers.models.step3p7."""
    return perception(options, files, config, WindowSizing)


def step3vl10b(options: ModelOptions, files: Files, config: Json) -> ModelSpec:
    """Step3-VL-10B: stepfun-ai/Step3-VL-10B, cut as its own code does."""
    return perception(options, files, config, PaddedWindows)


def step3(options: ModelOptions, files: Files, config: Json) -> ModelSpec:
    """Step3 (321B): stepfun-ai/step3."""
    only(config, {"understand_projector_stride": 2}, "config.json")
    vision = {"projector_bias": config.get("projector_bias", True)} | config["vision_config"]
    spec = windowed("step3_vl", options, files, config, vision, PaddedWindows)
    return replace(spec, fast_blocks=False)  # its norms follow attention and MLP


def perception(
    options: ModelOptions, files: Files, config: Json, sizing: type[WindowSizing]
) -> ModelSpec:
    """Either model with a Perception Encoder."""
    vision = {"projector_bias": config.get("projector_bias", False)} | config["vision_config"]
    without = {"use_cls_token": False, "ues_cls_token": False, "use_ln_post": False}
    only(vision, without, "vision_config")
    only(
        vision, dict.fromkeys(("use_ln_pre", "use_abs_posemb", "use_rope2d"), True), "vision_config"
    )
    return windowed("step3p7", options, files, config, vision, sizing)


def windowed(
    family: str,
    options: ModelOptions,
    files: Files,
    config: Json,
    vision: Json,
    kind: type[WindowSizing],
) -> ModelSpec:
    """The spec of a family that is cut into windows."""
    only(vision, {"hidden_act": "quick_gelu", "num_channels": 3}, "vision_config")
    processor = image_processor(files, BILINEAR)
    sizing = kind(
        image_pixels=side(processor.get("size") or vision["image_size"]),
        crop_pixels=int(processor.get("patch_size", 504)),
        longest_pixels=int(processor.get("max_image_size", 3024)),
        patch_size=int(vision["patch_size"]),
        merge_size=STEP_MERGE_SIZE,
    )
    for pixels in (sizing.image_pixels, sizing.crop_pixels):
        if pixels % (STEP_MERGE_SIZE * sizing.patch_size):
            raise ValueError(f"a view of {pixels} pixels: only whole tokens are supported")
    clip = {"image_mean": CLIP_MEAN, "image_std": CLIP_STD}
    width = config["text_config"]["hidden_size"]
    spec = image_spec(family, options, clip | processor, vision, sizing, width)
    return replace(spec, paths=PATHS)


FAMILIES: dict[str, Callable[[ModelOptions, Files, Json], ModelSpec]] = {
    "deepseek_vl_v2": deepseek_ocr,
    "step3p7": step3p7,
    "step_robotics": step3vl10b,
    "step3_vl": step3,
}
