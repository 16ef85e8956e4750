"""Small random checkpoints of DINO, as transformers saves them."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from tests.checkpoints_clip import CROPPED, PICTURE, TOWER, written
from tests.checkpoints_tiles import scatter

WIDER = CROPPED | {"size": {"shortest_edge": 96}}
"""The crop is smaller than the resized image's shorter side, as published."""


def write_dinov2(
    folder: Path,
    registers: int = 0,
    *,
    gated: bool = False,
    image_size: int = 126,
    kind: str = "Model",
) -> Any:
    """Writes a DINOv2 in float32 with random weights; returns transformers' model of it. The
    position table is for `image_size`; images have 84 pixels a side."""
    module, name = import_module("transformers"), "Dinov2WithRegisters" if registers else "Dinov2"
    torch.manual_seed(0)
    sizes = {key: value for key, value in TOWER.items() if key != "intermediate_size"}
    sizes |= {"mlp_ratio": 2, "image_size": image_size, "use_swiglu_ffn": gated}
    if registers:
        sizes["num_register_tokens"] = registers
    model = getattr(module, name + kind)(getattr(module, f"{name}Config")(**sizes)).eval()
    scatter(model)
    return written(folder, model, WIDER)


def write_dinov3(folder: Path, *, gated: bool = False) -> Any:
    """`write_dinov2` for DINOv3. Images have 90 pixels a side, of which patches cover 84. `gated`:
    with SwiGLU, and with no biases in linear layers; otherwise only the keys have none."""
    from transformers import DINOv3ViTConfig, DINOv3ViTModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = TOWER | {"num_register_tokens": 3}
    if gated:
        sizes |= {f"{part}_bias": False for part in ("query", "key", "value", "proj", "mlp")}
        sizes |= {"use_gated_mlp": True, "hidden_act": "silu"}
    config = DINOv3ViTConfig(**sizes)
    model = DINOv3ViTModel(config).eval()
    scatter(model)
    square = {"size": {"height": PICTURE, "width": PICTURE}, "resample": 2}
    return written(folder, model, square)
