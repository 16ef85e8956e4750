"""AIMv2 on its own, every image as one tile: transformers.models.aimv2."""

from __future__ import annotations

from actors.families.clip.spec import CLIP_TOWER, one_tile
from actors.spec.checkpoint import Json
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import ModelSource, only


def aimv2(source: ModelSource) -> ModelSpec:
    """Rows of the last hidden state."""
    only(source.config, {"is_native": False, "hidden_act": "silu"}, "config.json")
    vision = source.tower | {"model_type": CLIP_TOWER}
    width = vision["hidden_size"]
    return one_tile("aimv2_vision_model", "aimv2", source, vision, width, class_tokens=0)


TOWER: Json = {
    **{"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24},
    **{"num_attention_heads": 8, "image_size": 224, "patch_size": 14, "rms_norm_eps": 1e-5},
    **{"qkv_bias": False, "mlp_bias": False, "hidden_act": "silu"},
}
MODEL_TYPES = {"aimv2_vision_model": aimv2}
VISION_DEFAULTS = {"aimv2_vision_model": TOWER}

REFUSED = {"aimv2": "its text tower and its pooling are not written (aimv2-*-lit)"}
