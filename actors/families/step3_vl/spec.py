"""Step3 (stepfun-ai/step3), Step3-VL-10B and Step-3.7 (transformers.models.step3p7)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from actors.spec.checkpoint import Json
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import CLIP_PIXELS, ModelSource, only, side
from actors.spec.sizing import PATHS
from actors.spec.views import PaddedWindows, WindowSizing

MERGE_SIZE = 4
"""Two convolutions with a stride of 2 each follow the blocks of every Step3 tower."""


ALIASES = {"width": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}
"""Keys of the Perception Encoder's own configuration, and transformers' names for them."""


def step3p7(source: ModelSource) -> ModelSpec:
    """Images are divided as transformers' own processor does."""
    return perception(source, WindowSizing)


def step3vl10b(source: ModelSource) -> ModelSpec:
    """Images are divided as stepfun-ai/Step3-VL-10B's own code does."""
    return perception(source, PaddedWindows)


def step3(source: ModelSource) -> ModelSpec:
    """Step3 (321B), which has a tower of its own."""
    only(source.config, {"understand_projector_stride": 2}, "config.json")
    spec = windowed("step3_vl", source, source.vision, PaddedWindows, projector_bias=True)
    return replace(spec, fast_blocks=False)  # its norms follow attention and MLP


def perception(source: ModelSource, sizing: type[WindowSizing]) -> ModelSpec:
    """Step3-VL-10B and Step-3.7, which have a Perception Encoder."""
    vision = {ALIASES.get(key, key): value for key, value in source.vision.items()}
    without = {"use_cls_token": False, "ues_cls_token": False, "use_ln_post": False}
    used = dict.fromkeys(("use_ln_pre", "use_abs_posemb", "use_rope2d"), True)
    only(vision, without | used, "vision_config")
    vision["intermediate_size"] = int(vision["hidden_size"] * vision["mlp_ratio"])
    return windowed("step3p7", source, vision, sizing, projector_bias=False)


def windowed(
    family: str,
    source: ModelSource,
    vision: Json,
    kind: type[WindowSizing],
    *,
    projector_bias: bool,
) -> ModelSpec:
    """`projector_bias`: whether there is one, if config.json does not say."""
    only(vision, {"hidden_act": "quick_gelu", "num_channels": 3}, "vision_config")
    bias = source.config.get("projector_bias", projector_bias)
    vision = {"projector_bias": bias} | vision
    processor = source.image_processor(CLIP_PIXELS, "bilinear")
    sizing = kind(
        image_pixels=side(processor.get("size") or vision["image_size"]),
        crop_pixels=int(processor.get("patch_size", 504)),
        longest_pixels=int(processor.get("max_image_size", 3024)),
        patch_size=int(vision["patch_size"]),
        merge_size=MERGE_SIZE,
    )
    for pixels in (sizing.image_pixels, sizing.crop_pixels):
        if pixels % (MERGE_SIZE * sizing.patch_size):
            raise ValueError(f"a view of {pixels} pixels: only whole tokens are supported")
    return source.spec(
        family,
        processor,
        vision,
        sizing,
        source.text_width,
        folder="step3_vl",
        resample="bilinear",
        paths=PATHS,
    )


MODEL_TYPES = {
    "step3p7": step3p7,
    "step_robotics": step3vl10b,
    "step3_vl": step3,
}
PERCEPTION: Json = {
    **{"hidden_size": 1536, "num_hidden_layers": 47, "num_attention_heads": 16},
    **{"mlp_ratio": 8960 / 1536, "image_size": 728, "patch_size": 14},
    **{"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
}
VISION_DEFAULTS: Mapping[str, Json] = {
    "step3p7": PERCEPTION,
    "step_robotics": PERCEPTION,
    "step3_vl": {
        **{"hidden_size": 1792, "num_hidden_layers": 63, "num_attention_heads": 16},
        **{"intermediate_size": 3072, "output_hidden_size": 4096, "image_size": 728},
        **{"patch_size": 14, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
    },
}
"""The last is from the configuration class in Step3's own code."""
