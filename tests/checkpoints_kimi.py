"""A small random Kimi-K2.5 checkpoint under its published names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import moonvit
from tests.checkpoints_tiles import scatter

VISION = {
    "hidden_size": moonvit.WIDTH,
    "intermediate_size": moonvit.INNER,
    "num_attention_heads": moonvit.HEADS,
    "num_hidden_layers": 3,
}
TEXT = {
    "model_type": "deepseek_v3",
    "vocab_size": 64,
    "hidden_size": 96,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
PROCESSOR = {
    **{key: moonvit.PROCESSOR[key] for key in ("patch_size", "image_mean", "image_std")},
    "in_patch_limit": moonvit.LIMIT,
    "patch_limit_on_one_side": 512,
    "merge_kernel_size": 2,
    "fixed_output_tokens": None,
}


def write(folder: Path) -> Any:
    """Writes a whole model in float32 with a random tower; returns transformers' model of it."""
    from transformers import Kimi_K25Config, Kimi_K25ForConditionalGeneration

    torch.manual_seed(0)
    config = Kimi_K25Config(
        vision_config=VISION, text_config=TEXT, projection_hidden_size=moonvit.WIDTH
    )
    model = Kimi_K25ForConditionalGeneration(config).eval()
    scatter(model.model.vision_tower)
    scatter(model.model.mm_projector)
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    save_file({published(name): value for name, value in load_file(path).items()}, path)
    settings = {"media_proc_cfg": PROCESSOR}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return model


def published(name: str) -> str:
    """The published name of a tensor; transformers 5.23 saves three under other names."""
    name = name.removeprefix("model.") if "mm_projector." in name else name
    return name.replace("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed.")


def processor(image: Image.Image, **settings: Any) -> Mapping[str, Tensor]:
    """Kimi-VL's, as transformers' own needs torchvision. Equivalent up to 512 patches a side."""
    made = moonvit.processor(image, **settings)
    pixels = made["pixel_values"].view(-1, 3, moonvit.PATCH, moonvit.PATCH)
    return {**made, "pixel_values": pixels}
