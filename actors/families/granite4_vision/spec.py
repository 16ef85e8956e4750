"""Granite 4 Vision: transformers.models.granite4_vision.

Images are divided as in LLaVA-NeXT. A row has one feature for each layer of the language model that
takes one, in the order of `deepstack_features` in transformers.
"""

from __future__ import annotations

from dataclasses import replace

from actors.families.clip.spec import SIGLIP_TOWER, TOWERS
from actors.families.llava_next.spec import sizing_of
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import CLIP_PIXELS, ModelSource, layers_run, only

OFFSETS = 4
"""Projectors that see one patch of each block of 2 x 2: one projector for each place in it."""
MERGE = 2

QFORMER = {
    **{"num_hidden_layers": 1, "cross_attention_frequency": 1, "hidden_act": "gelu"},
    "use_qformer_text_input": False,
}


def granite4_vision(source: ModelSource) -> ModelSpec:
    config, processor = source.config, source.image_processor(CLIP_PIXELS)
    vision = TOWERS[SIGLIP_TOWER] | source.vision
    only({"model_type": "none"} | source.vision, {"model_type": SIGLIP_TOWER}, "vision_config")
    fixed = {"vision_feature_select_strategy": "full", "use_spatial_sampling": True}
    only(config, fixed | {"spatial_stride": MERGE}, "config.json")
    qformer = config.get("qformer_config") or {}
    only(qformer, QFORMER, "qformer_config")
    depth, targets = int(vision["num_hidden_layers"]), config.get("spatial_target_layers")
    if targets and len(targets) != OFFSETS:
        raise ValueError(f"spatial_target_layers: only {OFFSETS} layers are supported")
    stated = [layer for layer, _ in config["deepstack_layer_map"]]
    stated += [config.get("spatial_vision_layer", -1)] * OFFSETS
    layers = layers_run(stated, depth, "deepstack_layer_map")
    sizing = replace(sizing_of(source, processor, vision), merge_size=MERGE)
    query, window = map(int, config["downsample_rate"].split("/"))
    if window != MERGE * query or sizing.side_patches % window:
        raise ValueError(
            f"downsample_rate: {config['downsample_rate']} is not one half in whole windows"
        )
    seen = sorted(set(layers))
    vision |= {
        **{"used_layers": seen[-1], "taps": seen[:-1], "query_side": query},
        "features": [seen.index(layer) for layer in layers],
        "qformer_intermediate_size": qformer.get("intermediate_size", 3072),
        "qformer_layer_norm_eps": qformer.get("layer_norm_eps", 1e-12),
    }
    width = len(layers) * source.text_width
    spec = source.spec("granite4_vision", processor, vision, sizing, width)
    return replace(spec, deepstack=len(layers) - 1)


MODEL_TYPES = {"granite4_vision": granite4_vision}
