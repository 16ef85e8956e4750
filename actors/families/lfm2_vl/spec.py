"""LFM2-VL and LFM2.5-VL, in square tiles and as a whole: transformers.models.lfm2_vl."""

from __future__ import annotations

from actors.families.siglip2 import spec as siglip2
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import ModelSource, only, resampling, side
from actors.spec.slices import SquareSlices

FACTOR = 2
"""transformers' default of `downsample_factor`: patches per side of a token."""


def lfm2_vl(source: ModelSource) -> ModelSpec:
    config = source.config
    processor = source.image_processor(siglip2.PIXELS, None, always_resized=True)
    factor = int(config.get("downsample_factor") or FACTOR)
    fixed = {"projector_hidden_act": "gelu", "vision_feature_layer": -1}
    only(config, fixed, "config.json")
    patch, block = side(source.vision["patch_size"]), side(source.vision["patch_size"]) * factor
    same = {"encoder_patch_size": patch, "downsample_factor": factor}
    only(same | processor, same, "the image processor")
    tile = int(processor.get("tile_size") or 512)
    if tile % block:
        raise ValueError(f"tile_size of the image processor: {tile}, only multiples of {block}")
    split = processor.get("do_image_splitting", True)
    sizing = SquareSlices(
        patch_size=patch,
        merge_size=factor,
        max_slices=int(processor.get("max_tiles") or 10) if split else 1,
        min_slices=int(processor.get("min_tiles") or 2),
        slice_pixels=tile,
        min_tokens=int(processor.get("min_image_tokens") or 64),
        max_tokens=int(processor.get("max_image_tokens") or 256),
        tolerance=float(processor.get("max_pixels_tolerance") or 2.0),
        thumbnail=bool(processor.get("use_thumbnail", True)),
    )
    vision = siglip2.tower(source.vision) | {
        "projector_width": int(config.get("projector_hidden_size") or 2560),
        "projector_bias": config.get("projector_bias", True),
        "projector_norm": config.get("projector_use_layernorm", True),
    }
    mode, width = resampling(processor), source.text_width
    return source.spec("lfm2_vl", processor, vision, sizing, width, resample=mode)


MODEL_TYPES = {"lfm2_vl": lfm2_vl}
VISION_DEFAULTS = {"lfm2_vl": siglip2.TOWER}

REFUSED = {
    "lfm2-vl": "its files are of the first release, for code of its own: take today's revision",
    "lfm3_vl": "its tower has convolutions over patches, and fewer heads of keys than of queries",
}
