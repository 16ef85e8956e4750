"""Small random checkpoints of Molmo 2, as transformers writes them and as they are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.checkpoints_clip import TOWER, written
from tests.checkpoints_tiles import scatter

SIDE = 98
"""Seven patches: an overview has 16 tokens, and tiles start three patches apart."""
SIZE = {"height": SIDE, "width": SIDE}
SIZES = {"size": SIZE, "max_crops": 4, "overlap_margins": [2, 2], "patch_size": 14, "resample": 2}

ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
TEXT = {
    **{"hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24},
    **{"vocab_size": 256, "num_hidden_layers": 1, "intermediate_size": 128},
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}


def write_molmo2(folder: Path, layers: int = 3) -> Any:
    """Writes a whole model in float32 with a random tower, of which two layers are used; returns
    transformers' model of it."""
    from transformers import Molmo2Config, Molmo2ForConditionalGeneration

    torch.manual_seed(0)
    adapter = {"vision_feature_layer": [1, 0], "hidden_size": 64, "intermediate_size": 80}
    config = Molmo2Config(
        vision_config=TOWER | ATTENTION | {"image_size": [SIDE, SIDE], "num_hidden_layers": layers},
        adapter_config=adapter | ATTENTION | {"text_hidden_size": 96},
        text_config=TEXT,
    )
    model = Molmo2ForConditionalGeneration(config).eval()
    scatter(model.model.vision_tower)
    scatter(model.model.multi_modal_projector)
    written(folder, model, SIZES | {"pooling_size": [2, 2]})
    frames = {"size": SIZE, "pooling_size": [3, 3], "resample": 2}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(frames))
    return model


def write_published_molmo2(folder: Path) -> Any:
    """The same without unused layers, and with the config.json of published checkpoints, which
    counts layers that are absent."""
    model = write_molmo2(folder, layers=2)
    config = json.loads((folder / "config.json").read_text())
    vision = config.pop("vision_config")
    vision |= {"image_default_input_size": [SIDE, SIDE], "image_patch_size": 14}
    del vision["image_size"], vision["patch_size"]
    config["vit_config"] = vision | {"num_hidden_layers": 4}
    config["adapter_config"]["vit_layers"] = [-3, -4]
    del config["adapter_config"]["vision_feature_layer"]
    (folder / "config.json").write_text(json.dumps(config))
    return model
