"""PaliGemma 1 and 2, each image stretched to one tile: transformers.models.paligemma."""

from __future__ import annotations

from actors.families.clip.spec import SIGLIP_TOWER, TOWERS, one_tile
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import ModelSource, only

WIDTH = 2048  # transformers' default of projection_dim


def paligemma(source: ModelSource) -> ModelSpec:
    """`projection_dim` of `vision_config` is not read: transformers overwrites it."""
    fixed = {"model_type": SIGLIP_TOWER, "hidden_act": "gelu_pytorch_tanh"}
    only(source.vision, fixed, "vision_config")
    layers = int(source.vision["num_hidden_layers"])
    vision = source.vision | {"model_type": SIGLIP_TOWER, "used_layers": layers}
    width = source.config.get("projection_dim", WIDTH)
    return one_tile("paligemma", "paligemma", source, vision, width, class_tokens=0)


MODEL_TYPES = {"paligemma": paligemma}
VISION_DEFAULTS = {"paligemma": TOWERS[SIGLIP_TOWER]}
