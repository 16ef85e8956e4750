"""Towers as they are published, and the same of few layers: kernels and shapes are the same.

Every layer does what the one before it did; what depth adds is rounding, and minutes. Qwen3-VL
keeps all its layers; of the others test_whole_towers.py takes all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.engine.device import Device
from actors.families import registry
from actors.models import load
from actors.models.tower import Tower
from actors.options import ModelOptions
from actors.spec.model_spec import ModelSpec

FEWER: dict[str, dict[str, Any]] = {
    "qwen2vl-7b": {"depth": 4},
    "qwen25vl-7b": {"depth": 4, "fullatt_block_indexes": [1, 3]},
    "exaone45-33b": {"depth": 4, "fullatt_block_indexes": [1, 3]},
    "qwen35-27b": {"depth": 4},
    "glm41v-9b": {"depth": 4},
    "glm-ocr": {"depth": 4},
    "glm53-flash": {"depth": 4},
    "hunyuan-ocr": {"num_hidden_layers": 4},
    "minimax-m3": {"num_hidden_layers": 4},
    "ernie45vl-28b": {"depth": 4},
    "kimivl-a3b": {"num_hidden_layers": 4},
    "kimik25": {"num_hidden_layers": 4},
    "internvl3-8b": {"num_hidden_layers": 4},
    "internvl3-78b": {"num_hidden_layers": 4},
    "llama4-scout": {"num_hidden_layers": 4},
    "llama32-vision-11b": {
        **{"num_hidden_layers": 4, "num_global_layers": 2},
        **{"intermediate_layers_indices": [0, 2], "vision_output_dim": 3840},
    },
    "gemma3-4b": {"num_hidden_layers": 4},
    "gemma4-31b": {"num_hidden_layers": 4},
    "siglip-so400m": {"used_layers": 4},
    "clip-vit-l-336": {"used_layers": 4},
    "siglip2-base-naflex": {"used_layers": 4},
    "dinov2-base": {"num_hidden_layers": 4},
    "dinov3-vitb16": {"num_hidden_layers": 4},
    "aimv2-large-224": {"num_hidden_layers": 4},
    "mlcd-bigg-448": {"num_hidden_layers": 4},
    "llava15-7b": {"used_layers": 4},
    "llava-next-7b": {"used_layers": 4},
    "llava-next-video-7b": {"used_layers": 4},
    "granite-vision-4.1-4b": {"used_layers": 4, "taps": [1, 2, 3]},
    "phi4-multimodal": {"used_layers": 4},
    "nemotron-3-nano-omni": {"num_hidden_layers": 4},
    "molmo2-4b": {"used_layers": 4, "taps": [1]},
    "llava-onevision-7b": {"used_layers": 4},
    "paligemma2-3b": {"used_layers": 4},
    "janus-pro-1b": {"num_hidden_layers": 4},
    "aya-vision-8b": {"used_layers": 4},
    "command-a-vision": {"used_layers": 4},
    "ovis2-2b": {"num_hidden_layers": 4},
    "smolvlm2-2b": {"used_layers": 4},
    "pixtral-12b": {"num_hidden_layers": 4},
    "mistral-small31": {"num_hidden_layers": 4},
    "lighton-ocr": {"num_hidden_layers": 4},
    "minicpmv-4.6": {"num_hidden_layers": 4, "insert_layer_id": 1},
    "lfm25vl-1.6b": {"used_layers": 4},
    "paddleocr-vl": {"num_hidden_layers": 4},
    "videollama3-7b": {"num_hidden_layers": 4},
    "step3vl-10b": {"num_hidden_layers": 4},
    "step3-321b": {"num_hidden_layers": 4},
}
"""What is other in `vision_config`."""

FEWER_VIEWED: dict[str, dict[str, Any]] = {
    "clip-l-14-224": {"layers": 4},
    "sam_vit_b": {"layers": 4, "global_attn_indexes": [1, 3]},
    "qwen2-0-5b": {"layers": 4},
}
"""The same of the towers inside DeepSeek-OCR and DeepSeek-OCR 2."""


def cuda() -> Device:
    """The GPU, or the test is skipped."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from actors.engine.cuda import CudaDevice

    return CudaDevice()


def published(preset: str) -> ModelSpec:
    """A preset in bfloat16, with random weights."""
    return registry.read(ModelOptions(id=preset, load_format="dummy", dtype="bfloat16"))


def shallow(preset: str) -> ModelSpec:
    """The same with few layers."""
    model = published(preset)
    fewer = FEWER.get(preset, {})
    if preset.startswith("deepseek-ocr"):
        sizes = model.vision["width"]
        fewer = {"width": {name: sizes[name] | FEWER_VIEWED[name] for name in sizes}}
    return replace(model, vision={**model.vision, **fewer})


def towers(model: ModelSpec, device: Device) -> tuple[Tower, Tower]:
    """In bfloat16, and the same weights in float32."""
    options = ModelOptions(id=model.id, load_format="dummy")
    weights = load.tensors(options, model, device.device)
    tower = load.build(model, weights, device.device)
    return tower, load.build(replace(model, dtype="float32"), weights, device.device)


def finished(rows: Tensor) -> Tensor:
    """A copy, once the compute stream has written them: this thread is on another stream."""
    synchronize(rows.device)
    return rows.clone()


def synchronize(device: torch.device) -> None:
    """Nothing runs any more."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def relative_error(rows: Tensor, reference: Tensor) -> float:
    """Not a number if either holds one, and so below no bound."""
    return float((rows.float() - reference.float()).norm() / reference.float().norm())
