"""PaddleOCR-VL: transformers.models.paddleocr_vl."""

from __future__ import annotations

from collections.abc import Mapping

from actors.spec.checkpoint import Json
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import CLIP_PIXELS, ModelSource, only, pixel_range
from actors.spec.sizing import RoundingSizing


def paddleocr(source: ModelSource) -> ModelSpec:
    vision, processor = source.vision, source.image_processor(CLIP_PIXELS)
    only(vision, {"hidden_act": "gelu_pytorch_tanh"}, "vision_config")
    sizing = RoundingSizing(
        int(vision["patch_size"]),
        int(vision["spatial_merge_size"]),
        *pixel_range(processor, 384**2, 1536**2),
    )
    # In published checkpoints, the language model's settings are not in text_config.
    width = source.config.get("text_config", source.config)["hidden_size"]
    return source.spec("paddleocr_vl", processor, vision, sizing, width)


MODEL_TYPES = {"paddleocr_vl": paddleocr}
VISION_DEFAULTS: Mapping[str, Json] = {
    "paddleocr_vl": {
        **{"num_hidden_layers": 27, "hidden_size": 1152, "intermediate_size": 4304},
        **{"num_attention_heads": 16, "image_size": 384, "patch_size": 14},
        **{"spatial_merge_size": 2, "layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh"},
    }
}
