"""VideoLLaMA 3, images: transformers.models.video_llama_3."""

from __future__ import annotations

from actors.spec.model_spec import ModelSpec
from actors.spec.settings import HALVES, ModelSource, only, pixel_range
from actors.spec.sizing import PackedSizing


def video_llama_3(source: ModelSource) -> ModelSpec:
    vision, processor = source.vision, source.image_processor(HALVES)
    only(vision, {"hidden_act": "gelu_pytorch_tanh"}, "vision_config")
    expected = {"patch_size": vision["patch_size"], "merge_size": 1, "temporal_patch_size": 1}
    only(processor, expected, "the image processor")
    sizing = PackedSizing(
        int(vision["patch_size"]), 1, *pixel_range(processor, 56**2, 1280 * 28**2)
    )
    return source.spec("video_llama_3", processor, vision, sizing, source.text_width)


MODEL_TYPES = {"video_llama_3": video_llama_3}
VISION_DEFAULTS = {
    "video_llama_3": {
        **{"num_hidden_layers": 12, "hidden_size": 768, "intermediate_size": 3072},
        **{"num_attention_heads": 12, "patch_size": 16, "layer_norm_eps": 1e-6},
        "hidden_act": "gelu_pytorch_tanh",
    }
}

REFUSED = {
    "videollama3_qwen2": "its files are for code of its own: take those converted to transformers "
    "(-HF)"
}
