"""Kimi-VL: moonshotai/Kimi-VL-A3B-*, whose code transformers does not have."""

from __future__ import annotations

from collections.abc import Mapping

from actors.options import ModelOptions
from actors.spec.checkpoint import Files, Json
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import CLIP_PIXELS, Reader, image_processor, image_spec
from actors.spec.sizing import CappedSizing

SIDE_PATCHES = 512
"""Kimi-VL's own processor always rejects images with this many patches on a side."""


def kimivl(options: ModelOptions, files: Files, config: Json) -> ModelSpec:
    vision, processor = config["vision_config"], image_processor(files)
    if processor.get("pad_input") is not True:
        raise ValueError("pad_input of the image processor: only true is supported")
    if vision["init_pos_emb_height"] != vision["init_pos_emb_width"]:
        raise ValueError("init_pos_emb_height: only that of init_pos_emb_width is supported")
    sizing = CappedSizing(
        patch_size=int(vision["patch_size"]),
        merge_size=merge_size(vision),
        max_patches=int(processor.get("in_token_limit", 4096)),
        max_side_patches=SIDE_PATCHES,
    )
    pixels, width = CLIP_PIXELS | processor, config["text_config"]["hidden_size"]
    return image_spec("kimi_vl", options, pixels, vision, sizing, width)


def merge_size(vision: Json) -> int:
    merge, other = vision["merge_kernel_size"]
    if merge != other:
        raise ValueError("merge_kernel_size: only squares are supported")
    return int(merge)


MODEL_TYPES: Mapping[str, Reader] = {"kimi_vl": kimivl}
