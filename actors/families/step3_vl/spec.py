"""Step3 (stepfun-ai/step3), Step3-VL-10B and Step-3.7 (transformers.models.step3p7)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from actors.options import ModelOptions
from actors.spec.checkpoint import Files, Json
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import CLIP_PIXELS, Reader, image_processor, image_spec, only, side
from actors.spec.sizing import PATHS
from actors.spec.views import PaddedWindows, WindowSizing

MERGE_SIZE = 4
"""Two convolutions with a stride of 2 each follow the blocks of every Step3 tower."""


def step3p7(options: ModelOptions, files: Files, config: Json) -> ModelSpec:
    """Images are divided as transformers' own processor does."""
    return perception(options, files, config, WindowSizing)


def step3vl10b(options: ModelOptions, files: Files, config: Json) -> ModelSpec:
    """Images are divided as stepfun-ai/Step3-VL-10B's own code does."""
    return perception(options, files, config, PaddedWindows)


def step3(options: ModelOptions, files: Files, config: Json) -> ModelSpec:
    """Step3 (321B), which has a tower of its own."""
    only(config, {"understand_projector_stride": 2}, "config.json")
    vision = {"projector_bias": config.get("projector_bias", True)} | config["vision_config"]
    spec = windowed("step3_vl", options, files, config, vision, PaddedWindows)
    return replace(spec, fast_blocks=False)  # its norms follow attention and MLP


def perception(
    options: ModelOptions, files: Files, config: Json, sizing: type[WindowSizing]
) -> ModelSpec:
    """Step3-VL-10B and Step-3.7, which have a Perception Encoder."""
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
    only(vision, {"hidden_act": "quick_gelu", "num_channels": 3}, "vision_config")
    processor = image_processor(files, "bilinear")
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
    return image_spec(
        family,
        options,
        CLIP_PIXELS | processor,
        vision,
        sizing,
        config["text_config"]["hidden_size"],
        folder="step3_vl",
        resample="bilinear",
        paths=PATHS,
    )


MODEL_TYPES: Mapping[str, Reader] = {
    "step3p7": step3p7,
    "step_robotics": step3vl10b,
    "step3_vl": step3,
}
