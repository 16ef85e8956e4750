"""PaddleOCR-VL: transformers.models.paddleocr_vl."""

from __future__ import annotations

from collections.abc import Mapping

from actors.options import ModelOptions
from actors.spec.checkpoint import Files, Json
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import (
    CLIP_PIXELS,
    Reader,
    image_processor,
    image_spec,
    only,
    pixel_range,
    rope_theta,
)
from actors.spec.sizing import RoundingSizing


def paddleocr(options: ModelOptions, files: Files, config: Json) -> ModelSpec:
    vision, processor = config["vision_config"], image_processor(files)
    only(vision, {"hidden_act": "gelu_pytorch_tanh"}, "vision_config")
    vision = {"layer_norm_eps": 1e-6} | vision | {"rope_theta": rope_theta(vision)}
    sizing = RoundingSizing(
        int(vision["patch_size"]),
        int(vision["spatial_merge_size"]),
        *pixel_range(processor, 384**2, 1536**2),
    )
    # In published checkpoints the language model's settings are not in text_config.
    width = config.get("text_config", config)["hidden_size"]
    return image_spec("paddleocr_vl", options, CLIP_PIXELS | processor, vision, sizing, width)


MODEL_TYPES: Mapping[str, Reader] = {"paddleocr_vl": paddleocr}
