"""MiniCPM-V 4.6 and 4.7, images only: transformers.models.minicpmv4_6, minicpmv4_7."""

from __future__ import annotations

from collections.abc import Mapping

from actors.spec.checkpoint import Json
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import HALVES, ModelSource, only, side
from actors.spec.slices import ScaledSlices

MERGE = 4
"""Two mergers, one between layers, take 2 x 2 patches each."""

INSERTED = 6
"""transformers' default of `insert_layer_id`."""


def minicpmv(source: ModelSource) -> ModelSpec:
    config, vision, processor = source.config, source.vision, source.image_processor(HALVES)
    only(config, {"merge_kernel_size": [2, 2], "merger_times": 1}, "config.json")
    only(vision, {"window_kernel_size": [2, 2]}, "vision_config")
    only(vision, {"hidden_act": "gelu_pytorch_tanh"}, "vision_config")
    for settings, whose in ((config, "config.json"), (processor, "the image processor")):
        only(settings, {"downsample_mode": "16x"}, whose)
    patch, layers = side(vision["patch_size"]), vision["num_hidden_layers"]
    if int(processor.get("patch_size") or 14) != patch:
        raise ValueError(
            f"patch_size of the image processor: only the tower's {patch} is supported"
        )
    inserted = int(config.get("insert_layer_id", INSERTED))
    if not 0 <= inserted < layers - 1:
        raise ValueError(f"insert_layer_id: only 0 to {layers - 2} are supported")
    sliced = processor.get("slice_mode", True)
    sizing = ScaledSlices(
        patch_size=patch,
        merge_size=MERGE,
        picture_pixels=int(processor.get("scale_resolution") or 448),
        max_slices=int(processor.get("max_slice_nums") or 9) if sliced else 1,
    )
    vision |= {"insert_layer_id": inserted}  # config.json's wins over that of `vision_config`
    family, width = config["model_type"], source.text_width
    return source.spec(family, processor, vision, sizing, width, folder="minicpmv")


MODEL_TYPES = {"minicpmv4_6": minicpmv, "minicpmv4_7": minicpmv}
REFUSED = {"minicpmv": "its patches are resampled by queries"}
TOWER: Json = {
    **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12},
    **{"num_attention_heads": 12, "image_size": 224, "patch_size": 16},
    **{"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "window_kernel_size": [2, 2]},
}
VISION_DEFAULTS: Mapping[str, Json] = dict.fromkeys(MODEL_TYPES, TOWER)
