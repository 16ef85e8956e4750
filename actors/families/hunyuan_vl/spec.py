"""HunyuanOCR 1.0 and 1.5, and others of Hunyuan-VL: transformers.models.hunyuan_vl."""

from __future__ import annotations

from actors.spec.model_spec import ModelSpec
from actors.spec.settings import CLIP_PIXELS, ModelSource, only, pixel_range
from actors.spec.sizing import LinedSizing


def hunyuan_vl(source: ModelSource) -> ModelSpec:
    """Images are always resized bicubically, as in transformers, whatever the processor's
    `resample` says."""
    vision, processor = source.vision, source.image_processor(CLIP_PIXELS, resample=None)
    fixed = {"hidden_act": "gelu", "interpolate_mode": "bilinear", "cat_extra_token": True}
    only(vision, fixed | {"add_patchemb_bias": True}, "vision_config")
    only(processor, {"temporal_patch_size": 1}, "the image processor")
    limits = pixel_range(processor, 512**2, 2048**2)
    sizing = LinedSizing(int(vision["patch_size"]), int(vision["spatial_merge_size"]), *limits)
    text = source.config.get("text_config") or source.config  # 1.0 has its keys at the top
    vision |= {"image_size": vision["max_image_size"]}
    return source.spec("hunyuan_vl", processor, vision, sizing, text["hidden_size"])


MODEL_TYPES = {"hunyuan_vl": hunyuan_vl}
VISION_DEFAULTS = {
    "hunyuan_vl": {
        **{"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27},
        **{"num_attention_heads": 16, "patch_size": 16, "spatial_merge_size": 2},
        **{"max_image_size": 2048, "rms_norm_eps": 1e-5, "hidden_act": "gelu"},
        "interpolate_mode": "bilinear",
    }
}
REFUSED = {"hy_v4_vl": "its projector is another one, and it resamples positions differently"}
