"""The image understanding of Janus and Janus-Pro: transformers.models.janus."""

from __future__ import annotations

from actors.spec.model_spec import ModelSpec
from actors.spec.settings import CLIP_PIXELS, ModelSource, only, tile_sides
from actors.spec.tiles import CentredTile


def janus(source: ModelSource) -> ModelSpec:
    vision, processor = source.vision, source.image_processor(CLIP_PIXELS)
    fixed = {"hidden_act": "gelu", "attention_bias": True, "use_qk_norm": False}
    only(vision, fixed, "vision_config")
    sides = tile_sides(vision, processor)
    sizing = CentredTile(
        tile_pixels=sides["tile_pixels"],
        patch_size=sides["patch_size"],
        merge_size=1,
        max_tiles=1,
        picture_pixels=sides["tile_pixels"],
        cropped=False,
        class_tokens=0,
        shortest_pixels=int(processor.get("min_size", 14)),
    )
    return source.spec("janus", processor, vision, sizing, vision["projection_dim"])


MODEL_TYPES = {"janus": janus}
VISION_DEFAULTS = {
    "janus": {
        **{"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16},
        **{"image_size": 384, "patch_size": 16, "hidden_act": "gelu", "layer_norm_eps": 1e-6},
        **{"mlp_ratio": 4.0, "projection_dim": 2048, "depth": 2},
    }
}
REFUSED = {"multi_modality": "its tensors have the names of its own code, not of transformers"}
