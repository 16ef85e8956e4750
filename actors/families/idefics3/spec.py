"""Idefics3 and SmolVLM 1 and 2, images only: transformers.models.idefics3, smolvlm."""

from __future__ import annotations

from collections.abc import Mapping

from actors.families.clip.spec import SIGLIP_TOWER
from actors.spec.checkpoint import Json
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import HALVES, ModelSource, only, side, tower_pixels
from actors.spec.tiles import SplitTiles

LARGEST_PIXELS = 4096  # the processor shrinks images to this, in a step that is not done here


def idefics3(source: ModelSource) -> ModelSpec:
    processor = source.image_processor(HALVES, "lanczos")
    only(processor, {"do_image_splitting": True}, "the image processor")
    vision = source.vision | {"model_type": SIGLIP_TOWER}
    vision |= {"used_layers": int(vision["num_hidden_layers"])}
    patch = side(vision["patch_size"])
    pixels = tower_pixels(vision, processor.get("max_image_size", {}).get("longest_edge"))
    longest = int(processor["size"]["longest_edge"])
    if longest % pixels or longest > LARGEST_PIXELS:
        raise ValueError(
            f"size of the image processor: only multiples of {pixels} up to {LARGEST_PIXELS} are "
            "supported"
        )
    sizing = SplitTiles(
        tile_pixels=pixels // patch * patch,
        patch_size=patch,
        merge_size=int(source.config.get("scale_factor", 2)),
        max_tiles=(longest // pixels) ** 2,
        picture_pixels=pixels,
        longest_pixels=longest,
    )
    width = source.text_width
    return source.spec("idefics3", processor, vision, sizing, width, resample="lanczos")


MODEL_TYPES = {"idefics3": idefics3, "smolvlm": idefics3}

TOWER: Json = {
    **{"hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 12},
    **{"num_attention_heads": 16, "image_size": 224, "patch_size": 32},
    **{"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
}
VISION_DEFAULTS: Mapping[str, Json] = dict.fromkeys(MODEL_TYPES, TOWER)

REFUSED = {
    "granite_docling": "its connector has DeepStack mergers and a second, finer route",
}
