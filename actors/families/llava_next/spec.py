"""LLaVA-NeXT (1.6) and LLaVA-NeXT-Video: transformers.models.llava_next, llava_next_video.

Granite Vision 3.1 to 3.3 is a LLaVA-NeXT over SigLIP with several feature layers.
"""

from __future__ import annotations

from dataclasses import replace

from actors.families.clip.spec import CLIP_TOWER
from actors.families.llava.spec import used
from actors.families.llava_onevision.spec import FRAMES, anyres, pinpoints_of
from actors.spec.checkpoint import Json
from actors.spec.model_spec import ModelSpec
from actors.spec.sampling import Evenly
from actors.spec.settings import CLIP_PIXELS, ModelSource, only, shorter_side, side
from actors.spec.tiles import AnyresSizing
from actors.spec.video import POOLED, AveragedFrames

PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
"""transformers' default."""


def llava_next(source: ModelSource) -> ModelSpec:
    """The tower is that of LLaVA-OneVision, but canvases are not scaled down."""
    processor, vision = source.image_processor(CLIP_PIXELS), used(source)
    strategy = source.config.get("vision_feature_select_strategy", "default")
    if (vision["model_type"] == CLIP_TOWER) != (strategy == "default"):
        raise ValueError(
            "vision_feature_select_strategy: only default is supported of CLIP, only full of SigLIP"
        )
    sizing, width = sizing_of(source, processor, vision), source.text_width
    return source.spec("llava_next", processor, vision, sizing, width, folder="llava_onevision")


def sizing_of(source: ModelSource, processor: Json, vision: Json) -> AnyresSizing:
    """Divides images as LlavaNextImageProcessor does."""
    sizing = anyres(vision, processor, pinpoints_of(source, processor) or PINPOINTS)
    if side(processor.get("crop_size") or sizing.picture_pixels) != sizing.picture_pixels:
        raise ValueError(
            f"crop_size of the image processor: only {sizing.picture_pixels} is supported"
        )
    return sizing


def llava_next_video(source: ModelSource) -> ModelSpec:
    """The model's own processor does not sample frames by default. The model was trained on 32."""
    only(source.config, {"spatial_pool_mode": "average"}, "config.json")
    only(source.config, {"spatial_pool_stride": POOLED}, "config.json")
    model = replace(llava_next(source), family="llava_next_video", folder="llava_next")
    sizing, settings = model.sizing, source.video_processor()
    assert isinstance(sizing, AnyresSizing)
    if sizing.side_patches % POOLED:
        raise ValueError("patch_size of vision_config: only even numbers of patches are supported")
    only(settings, {"fps": None, "do_center_crop": True}, "the video processor")
    pixels = sizing.picture_pixels
    for key, size in (
        ("size", shorter_side(settings.get("size"))),
        ("crop_size", settings.get("crop_size")),
    ):
        if side(size or pixels) != pixels:
            message = f"{key} of the video processor: only the tower's {pixels} is supported"
            raise ValueError(message)
    rule = Evenly(int(settings.get("num_frames") or FRAMES))
    video = AveragedFrames(rule, sizing.patch_size, 1, 1, picture_pixels=pixels)
    return source.with_video(model, video)


MODEL_TYPES = {"llava_next": llava_next, "llava_next_video": llava_next_video}
