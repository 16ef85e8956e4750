"""Small random checkpoints of Pixtral and related models, under their published names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.checkpoints_clip import SETTINGS, written
from tests.checkpoints_tiles import scatter

TOWER = {
    "model_type": "pixtral",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 280,
    "patch_size": 14,
    "hidden_act": "silu",
}
TEXT = {
    "model_type": "mistral",
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
PROCESSOR = SETTINGS | {"size": {"longest_edge": 280}, "patch_size": 14}


def write_pixtral(folder: Path) -> Any:
    """Writes a whole Pixtral in float32 with a random tower; returns transformers' model of it."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    torch.manual_seed(0)
    layer = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    config = LlavaConfig(vision_config=TOWER, text_config=TEXT, image_token_index=5, **layer)
    return saved(folder, LlavaForConditionalGeneration(config).eval())


def write_mistral3(folder: Path) -> Any:
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    torch.manual_seed(0)
    text = TEXT | {"rms_norm_eps": 1e-3}
    config = Mistral3Config(vision_config=TOWER, text_config=text, image_token_index=5)
    return saved(folder, Mistral3ForConditionalGeneration(config).eval())


def write_lighton_ocr(folder: Path) -> Any:
    from transformers import LightOnOcrConfig, LightOnOcrForConditionalGeneration

    torch.manual_seed(0)
    text = TEXT | {"model_type": "qwen3", "head_dim": 24, "rms_norm_eps": 1e-3}
    config = LightOnOcrConfig(vision_config=TOWER, text_config=text, image_token_id=5)
    return saved(folder, LightOnOcrForConditionalGeneration(config).eval())


def saved(folder: Path, model: Any) -> Any:
    """Makes tower and projector random, and saves the model."""
    for name, part in model.model.named_children():
        if name != "language_model":
            scatter(part)
    return written(folder, model, PROCESSOR)
