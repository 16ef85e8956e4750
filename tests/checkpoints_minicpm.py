"""Small random checkpoints of MiniCPM-V, as transformers writes them."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from tests.checkpoints import LINEAR
from tests.checkpoints import TEXT as QWEN_TEXT
from tests.checkpoints_clip import written
from tests.checkpoints_tiles import scatter

TOWER = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 5},
    **{"num_attention_heads": 4, "image_size": 140, "patch_size": 14},
}
TEXT = deepcopy({"model_type": "qwen3_5_text"} | QWEN_TEXT | LINEAR)  # transformers writes into it
SIZES = {"scale_resolution": 168, "max_slice_nums": 4, "patch_size": 14}
"""Settings of the image processor: an image has about nine tokens."""


def write_minicpmv(folder: Path, version: str = "4_6") -> Any:
    """Writes a whole model in float32 with a random tower; returns transformers' model of it."""
    import transformers

    torch.manual_seed(0)
    name = f"MiniCPMV{version}"
    config = getattr(transformers, f"{name}Config")(
        vision_config=TOWER, text_config=TEXT, insert_layer_id=1
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    for part_name, part in model.model.named_children():
        if part_name != "language_model":
            scatter(part)
    return written(folder, model, SIZES)
