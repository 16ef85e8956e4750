"""Small random checkpoints of SigLIP, CLIP and LLaVA, under the names they are published with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.checkpoints_tiles import PROCESSOR, TEXT, scatter

TOWER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "patch_size": 14,
}
PICTURE = 90
"""SigLIP's, whose patches cover 84 pixels of it, as 378 of 384."""

SETTINGS = {key: PROCESSOR[key] for key in ("image_mean", "image_std", "resample")}
CROPPED = {"do_center_crop": True, "size": {"shortest_edge": 84}, "crop_size": 84}


def write_siglip(folder: Path) -> Any:
    """Writes a whole SigLIP in float32 with a random tower; returns transformers' model of it."""
    from transformers import SiglipConfig, SiglipModel

    torch.manual_seed(0)
    text = TOWER | {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}
    config = SiglipConfig(vision_config=TOWER | {"image_size": PICTURE}, text_config=text)
    model = SiglipModel(config).eval()
    scatter(model.vision_model)
    return written(folder, model, {"size": {"height": PICTURE, "width": PICTURE}})


def write_clip(folder: Path) -> Any:
    """The same of CLIP."""
    from transformers import CLIPConfig, CLIPModel

    torch.manual_seed(0)
    text = TOWER | {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}
    model = CLIPModel(CLIPConfig(vision_config=TOWER | {"image_size": 84}, text_config=text)).eval()
    scatter(model.vision_model)
    return written(folder, model, CROPPED)


def write_llava(folder: Path, tower: str, **settings: Any) -> Any:
    """The same of LLaVA over `clip` or `siglip`; `settings` as in config.json."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    torch.manual_seed(0)
    vision = TOWER | {"model_type": f"{tower}_vision_model"}
    vision["image_size"] = 84 if tower == "clip" else PICTURE
    config = LlavaConfig(vision_config=vision, text_config=TEXT, image_token_index=5, **settings)
    model = LlavaForConditionalGeneration(config).eval()
    scatter(model.model.vision_tower)
    scatter(model.model.multi_modal_projector)
    square = {"size": {"height": PICTURE, "width": PICTURE}}
    return written(folder, model, CROPPED if tower == "clip" else square)


def written(folder: Path, model: Any, processor: dict[str, Any]) -> Any:
    """The model, saved."""
    model.save_pretrained(folder, max_shard_size="150KB")
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS | processor))
    return model
