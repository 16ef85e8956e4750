"""DeepSeek-OCR: deepseek-ai/DeepSeek-OCR; transformers has the same as unlimited_ocr."""

from __future__ import annotations

from actors.families.deepseek_ocr2.spec import published
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import HALVES, ModelSource, only
from actors.spec.sizing import PATHS
from actors.spec.tiles import StretchedTiles
from actors.spec.views import CropSizing


def deepseek_ocr(source: ModelSource) -> ModelSpec:
    """Other towers have the same `model_type`: DeepSeek-OCR 2's, and some that are not supported.

    `tile_size`, `min_patches` and `max_patches` of the processor are named as transformers names
    them for unlimited_ocr. Defaults are those of the model's own code: 2 to 9 crops of 640 pixels.
    """
    vision, projector = source.vision, source.config["projector_config"]
    if vision.get("model_name") == "deepencoderv2":
        return published(source)
    only(vision, {"model_name": "deeplip_b_l"}, "vision_config")
    only(projector, {"projector_type": "linear"}, "projector_config")
    processor = HALVES | (source.files.read_json("processor_config.json") or {})
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
    width = projector["n_embed"]
    return source.spec("deepseek_ocr", processor, vision, sizing, width, paths=PATHS)


MODEL_TYPES = {"deepseek_vl_v2": deepseek_ocr, "DeepseekOCR": deepseek_ocr}
"""The latter as re-saved by transformers."""
