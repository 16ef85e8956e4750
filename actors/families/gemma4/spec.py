"""Gemma 4, images only: transformers.models.gemma4."""

from __future__ import annotations

from dataclasses import replace

from actors.spec.model_spec import ModelSpec
from actors.spec.settings import HALVES, ModelSource, only
from actors.spec.sizing import FillingSizing


def gemma4(source: ModelSource) -> ModelSpec:
    vision, processor = source.vision, source.image_processor({}, normalized=False)
    patch, merge = int(vision["patch_size"]), int(vision["pooling_kernel_size"])
    heads = int(vision["num_attention_heads"])
    fixed = {
        "hidden_activation": "gelu_pytorch_tanh",
        **{"num_key_value_heads": heads, "head_dim": int(vision["hidden_size"]) // heads},
    }
    only(vision, fixed, "vision_config")
    only(processor, {"patch_size": patch, "pooling_kernel_size": merge}, "the image processor")
    sizing = FillingSizing(patch, merge, int(processor.get("max_soft_tokens") or 280))
    # The tower itself normalises pixels.
    model = source.spec("gemma4", processor | HALVES, vision, sizing, source.text_width)
    return replace(model, fast_blocks=False)  # norms follow attention and MLP, too


MODEL_TYPES = {"gemma4": gemma4}
REFUSED = {
    "gemma3n": "its vision tower is MobileNetV5, which is convolutions of timm: this service does "
    "not depend on timm, and has none of its own",
    "gemma4_unified": "its images are projected without an encoder",
}
VISION_DEFAULTS = {
    "gemma4": {
        **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16},
        **{"num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 64},
        **{"patch_size": 16, "pooling_kernel_size": 3, "position_embedding_size": 10240},
        **{"rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh"},
        **{"use_clipped_linears": False, "standardize": False},
        "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
    }
}
