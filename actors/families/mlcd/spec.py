"""MLCD on its own, every image as one tile: transformers.models.mlcd.

Here, as in transformers, its smaller checkpoints are CLIPs.
"""

from __future__ import annotations

from actors.families.clip.spec import CLIP_TOWER, one_tile, with_vectors
from actors.spec.checkpoint import Json
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import ModelSource, only


def mlcd(source: ModelSource) -> ModelSpec:
    """Rows of the last hidden state, the class token's first, or only the class token's."""
    only(source.config, {"num_key_value_groups": 1}, "config.json")
    vision = source.tower | {"model_type": CLIP_TOWER}
    vision |= {"used_layers": int(vision["num_hidden_layers"])}
    spec = one_tile("mlcd", "mlcd", source, vision, vision["hidden_size"], class_tokens=1)
    return spec if source.options.output == "rows" else with_vectors(spec, CLIP_TOWER, source)


TOWER: Json = {
    **{"hidden_size": 1664, "intermediate_size": 8192, "num_hidden_layers": 48},
    **{"num_attention_heads": 16, "image_size": 336, "patch_size": 14},
    **{"hidden_act": "gelu", "layer_norm_eps": 1e-5},
    "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
}
MODEL_TYPES = {"mlcd": mlcd, "mlcd_vision_model": mlcd}
VISION_DEFAULTS = dict.fromkeys(MODEL_TYPES, TOWER)
