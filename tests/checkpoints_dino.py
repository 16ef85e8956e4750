"""Small random checkpoints of DINO, as transformers saves them."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from tests.checkpoints_clip import CROPPED, TOWER, written
from tests.checkpoints_tiles import scatter

WIDER = CROPPED | {"size": {"shortest_edge": 96}}
"""The picture is less than the shorter side of the image, as published."""


def write_dinov2(
    folder: Path,
    registers: int = 0,
    *,
    gated: bool = False,
    image_size: int = 126,
    kind: str = "Model",
) -> Any:
    """Writes a DINOv2 in float32 with random weights; returns transformers' model of it. The table
    of positions is for `image_size`, images have 84 pixels."""
    module, name = import_module("transformers"), "Dinov2WithRegisters" if registers else "Dinov2"
    torch.manual_seed(0)
    sizes = {key: value for key, value in TOWER.items() if key != "intermediate_size"}
    sizes |= {"mlp_ratio": 2, "image_size": image_size, "use_swiglu_ffn": gated}
    if registers:
        sizes["num_register_tokens"] = registers
    model = getattr(module, name + kind)(getattr(module, f"{name}Config")(**sizes)).eval()
    scatter(model)
    return written(folder, model, WIDER)
