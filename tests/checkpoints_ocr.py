"""A small random DeepSeek-OCR checkpoint under its published names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from actors.spec.checkpoint import Preset
from tests.checkpoints_tiles import scatter

TINY = Preset("deepseek-ocr-tiny").files

TEXT = {
    "hidden_size": 80,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 100,
    "n_routed_experts": 4,
    "pad_token_id": 0,
}

PUBLISHED = (
    (r"^vision_tower\.sam_encoder\.", "sam_model."),
    (r"^vision_tower\.vision_encoder\.encoder\.", "vision_model.transformer."),
    (r"^vision_tower\.vision_encoder\.", "vision_model."),
    (r"^sam_model\.layers\.", "sam_model.blocks."),
    (r"^(sam_model\.blocks\.\d+)\.layer_norm", r"\1.norm"),
    (r"patch_embed\.projection", "patch_embed.proj"),
    (r"neck\.conv1", "neck.0"),
    (r"neck\.layer_norm1", "neck.1"),
    (r"neck\.conv2", "neck.2"),
    (r"neck\.layer_norm2", "neck.3"),
    (r"^sam_model\.proj\.conv1", "sam_model.net_2"),
    (r"^sam_model\.proj\.conv2", "sam_model.net_3"),
    (r"^multi_modal_projector", "projector.layers"),
    (r"^view_separator", "view_seperator"),
)


def write_deepseek_ocr(folder: Path) -> Any:
    """Writes the checkpoint in float32; returns transformers' model of it (unlimited_ocr)."""
    from transformers.models.unlimited_ocr.configuration_unlimited_ocr import UnlimitedOcrConfig
    from transformers.models.unlimited_ocr.modeling_unlimited_ocr import UnlimitedOcrModel

    config = TINY["config.json"]
    sam, clip = (config["vision_config"]["width"][name] for name in ("sam_vit_b", "clip-l-14-224"))
    vision = {
        "sam_config": {
            **{"hidden_size": sam["width"], "mlp_dim": 4 * sam["width"]},
            **{"num_hidden_layers": sam["layers"], "num_attention_heads": sam["heads"]},
            "global_attn_indexes": sam["global_attn_indexes"],
            "downsample_channels": sam["downsample_channels"],
            "image_size": config["vision_config"]["image_size"],
        },
        "encoder_config": {
            **{"hidden_size": clip["width"], "intermediate_size": 4 * clip["width"]},
            **{"num_hidden_layers": clip["layers"], "num_attention_heads": clip["heads"]},
            **{"image_size": clip["image_size"], "patch_size": clip["patch_size"]},
        },
    }
    torch.manual_seed(0)
    model = UnlimitedOcrModel(UnlimitedOcrConfig(vision_config=vision, text_config=TEXT)).eval()
    scatter(model)
    for name, content in TINY.items():
        (folder / name).write_text(json.dumps(content))
    save_file(published(model.state_dict()), folder / "model.safetensors")
    return model


def write_deepseek_ocr2(folder: Path) -> Any:
    """Writes DeepSeek-OCR 2 in float32 with views as large as published; returns transformers'
    model.

    The tensors have their published names; config.json is that of transformers.
    """
    from transformers import DeepseekOcr2Config, DeepseekOcr2ForConditionalGeneration

    rotary = {"rope_type": "default", "rope_theta": 1e6}
    vision = {
        "sam_config": {
            **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
            **{"global_attn_indexes": [1], "downsample_channels": [32, 64]},
        },
        "encoder_config": {
            **{"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4},
            **{"num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 10},
            "rope_parameters": rotary,
        },
    }
    torch.manual_seed(0)
    config = DeepseekOcr2Config(
        vision_config=vision, text_config=TEXT | {"mlp_layer_types": ["sparse"]}
    )
    model = DeepseekOcr2ForConditionalGeneration(config).eval()
    scatter(model.model)
    model.save_pretrained(folder)
    processor = Preset("deepseek-ocr2").files["preprocessor_config.json"]
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return model.model


def published(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of transformers' model as deepseek-ai publishes them, with q, k and v fused."""
    named = {
        "model.vision_model.embeddings.patch_embedding.weight": torch.zeros(64, 3, 14, 14),
        "model.vision_model.embeddings.position_ids": torch.arange(17)[None],
    }
    for name, tensor in weights.items():
        if name.startswith("language_model."):
            named[f"model.{name.removeprefix('language_model.')}"] = tensor.clone()
            continue
        for pattern, replacement in PUBLISHED:
            name = re.sub(pattern, replacement, name)
        named[f"model.{name}"] = tensor.clone()
    for name in [name for name in named if ".q_proj." in name and "vision_model" in name]:
        parts = [named.pop(name.replace("q_proj", f"{one}_proj")) for one in "qkv"]
        named[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
    return named
