"""The configurations of the families with two paths: from config.json to a ModelSpec.

Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from actors.checkpoint import Files, Json
from actors.crops import CropSizing
from actors.options import ModelOptions
from actors.spec import ModelSpec, image_spec, only
from actors.tiling import StretchedTiles
from actors.two_paths import PATHS


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


FAMILIES: dict[str, Callable[[ModelOptions, Files, Json], ModelSpec]] = {
    "deepseek_vl_v2": deepseek_ocr,
}
