"""SigLIP 2 with NaFlex, images of any size at their own aspect ratio: transformers.models.siglip2.

SigLIP 2 of a fixed size is in clip, because transformers treats it as SigLIP.
"""

from __future__ import annotations

import math

from actors.families.clip.spec import SIGLIP_TOWER, TOWERS, with_vectors
from actors.spec.checkpoint import Json
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import HALVES, PIL_RESAMPLING, ModelSource, only, resampling, side
from actors.spec.sizing import NaflexSizing

TOWER: Json = {key: value for key, value in TOWERS[SIGLIP_TOWER].items() if key != "image_size"}
TOWER |= {"num_patches": 256, "vision_use_head": True}
PIXELS: Json = HALVES | {"resample": PIL_RESAMPLING["bilinear"]}


def siglip2(source: ModelSource) -> ModelSpec:
    """Rows of the last hidden state, or the vector of `get_image_features`."""
    vision, processor = tower(source.vision), source.image_processor(PIXELS, None)
    only(processor, {"patch_size": side(vision["patch_size"])}, "the image processor")
    sizing = NaflexSizing(
        patch_size=side(vision["patch_size"]),
        merge_size=1,
        max_patches=int(processor.get("max_num_patches") or 256),
    )
    mode, width = resampling(processor), vision["hidden_size"]
    spec = source.spec("siglip2", processor, vision, sizing, width, resample=mode)
    return spec if source.options.output == "rows" else with_vectors(spec, SIGLIP_TOWER, source)


def tower(vision: Json) -> Json:
    """`vision_config` as the tower reads it, for all its layers."""
    if math.isqrt(vision["num_patches"]) ** 2 != vision["num_patches"]:
        raise ValueError(f"num_patches of vision_config: {vision['num_patches']} is no square")
    return vision | {"used_layers": int(vision["num_hidden_layers"]), "model_type": SIGLIP_TOWER}


MODEL_TYPES = {"siglip2": siglip2}
VISION_DEFAULTS = {"siglip2": TOWER}
