"""LLaVA-NeXT (1.6), and images of LLaVA-NeXT-Video: transformers.models.llava_next.

Granite Vision 3.1 to 3.3 is one, over SigLIP with several feature layers.
"""

from __future__ import annotations

from actors.families.clip.spec import CLIP_TOWER
from actors.families.llava.spec import used
from actors.families.llava_onevision.spec import anyres, pinpoints_of
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import CLIP_PIXELS, ModelSource, shorter_side, side

PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
"""transformers' default."""


def llava_next(source: ModelSource) -> ModelSpec:
    """The tower is that of LLaVA-OneVision, whose canvases are scaled down besides."""
    processor, vision = source.image_processor(CLIP_PIXELS), used(source)
    strategy = source.config.get("vision_feature_select_strategy", "default")
    if (vision["model_type"] == CLIP_TOWER) != (strategy == "default"):
        raise ValueError(
            "vision_feature_select_strategy: only default is supported of CLIP, only full of SigLIP"
        )
    processor["size"] = shorter_side(processor.get("size"))
    sizing = anyres(vision, processor, pinpoints_of(source, processor) or PINPOINTS)
    if side(processor.get("crop_size") or sizing.picture_pixels) != sizing.picture_pixels:
        raise ValueError(
            f"crop_size of the image processor: only {sizing.picture_pixels} is supported"
        )
    width, folder = source.text_width, "llava_onevision"
    return source.spec("llava_next", processor, vision, sizing, width, folder=folder)


MODEL_TYPES = {"llava_next": llava_next, "llava_next_video": llava_next}

MASKED = "its SigLIP masks the padding of crops"
REFUSED = {
    "granite4_vision": "its projectors are Q-Formers over windows of several layers",
    **{"phi4_multimodal": MASKED, "phi4mm": MASKED},
}
