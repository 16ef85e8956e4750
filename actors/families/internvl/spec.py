"""InternVL 2 to 3.5 and Qianfan-OCR.

transformers.models.internvl and qianfan_ocr, and the first repositories' internvl_chat.
"""

from __future__ import annotations

from collections.abc import Mapping

from actors.spec.checkpoint import Json
from actors.spec.model_spec import ModelSpec
from actors.spec.sampling import Middles
from actors.spec.settings import IMAGENET_PIXELS, ModelSource, only, tile_sides
from actors.spec.tiles import StretchedTiles
from actors.spec.video import FrameTiles

FRAMES = 8  # default number of frames of a video, as in InternVL's model cards


def internvl(source: ModelSource) -> ModelSpec:
    """Checkpoints with transformers' tensor names."""
    processor, sizing = native(source)
    return with_frames(tiled("internvl", source, processor, sizing, source.text_width), source)


def qianfan_ocr(source: ModelSource) -> ModelSpec:
    """The same configuration, with the tensor names of internvl_chat and without videos."""
    processor, sizing = native(source)
    only(source.vision, {"use_qk_norm": False}, "vision_config")
    return tiled("qianfan_ocr", source, processor, sizing, source.text_width)


def native(source: ModelSource) -> tuple[Json, StretchedTiles]:
    """The image processor, and how images are divided, of transformers' own configuration."""
    processor = source.image_processor(IMAGENET_PIXELS)
    pooled = {"use_mean_pooling": True, "use_absolute_position_embeddings": True}
    only(source.vision, pooled, "vision_config")
    last = {"vision_feature_layer": -1, "vision_feature_select_strategy": "default"}
    only(source.config, last | {"projector_hidden_act": "gelu"}, "config.json")
    sizing = StretchedTiles(
        **tile_sides(source.vision, processor),
        merge_size=round(1 / source.config["downsample_ratio"]),
        min_tiles=int(processor.get("min_patches", 1)),
        max_tiles=int(processor.get("max_patches", 12)),
    )
    return processor, sizing


def internvl_chat(source: ModelSource) -> ModelSpec:
    """Checkpoints with the tensor names of OpenGVLab/InternVL's own code."""
    config, processor = source.config, source.image_processor(IMAGENET_PIXELS)
    defaults = {"ps_version": "v1", "dynamic_image_size": False, "use_thumbnail": False}
    dynamic = {"ps_version": "v2", "dynamic_image_size": True, "use_thumbnail": True}
    only(defaults | config, dynamic | {"select_layer": -1}, "config.json")
    sizing = StretchedTiles(
        **tile_sides(source.vision, processor),
        merge_size=round(1 / config.get("downsample_ratio", 0.5)),
        min_tiles=int(config.get("min_dynamic_patch", 1)),
        max_tiles=int(config.get("max_dynamic_patch", 6)),
    )
    width = config["llm_config"]["hidden_size"]
    return with_frames(tiled("internvl_chat", source, processor, sizing, width), source)


def tiled(
    family: str, source: ModelSource, processor: Json, sizing: StretchedTiles, width: int
) -> ModelSpec:
    only(source.vision, {"hidden_act": "gelu"}, "vision_config")
    return source.spec(family, processor, source.vision, sizing, width, folder="internvl")


def with_frames(model: ModelSpec, source: ModelSource) -> ModelSpec:
    """With videos as in transformers' InternVLVideoProcessor: each frame is one tile."""
    sizing, settings = model.sizing, source.video_processor()
    assert isinstance(sizing, StretchedTiles)
    video = FrameTiles(
        Middles(int(settings.get("num_frames") or FRAMES)),
        *(sizing.patch_size, sizing.merge_size, 1),
        tile_pixels=sizing.tile_pixels,
    )
    return source.with_video(model, video)


MODEL_TYPES = {"internvl": internvl, "internvl_chat": internvl_chat, "qianfan_ocr": qianfan_ocr}
NATIVE: Json = {
    **{"num_hidden_layers": 24, "hidden_size": 1024, "intermediate_size": 4096},
    **{"num_attention_heads": 16, "image_size": 448, "patch_size": 14, "hidden_act": "gelu"},
    **{"attention_bias": False, "use_qk_norm": False},
    **{"norm_type": "layer_norm", "layer_norm_eps": 1e-6},
}
VISION_DEFAULTS: Mapping[str, Json] = {
    "internvl": NATIVE,
    "qianfan_ocr": NATIVE | {"attention_bias": True},
    "internvl_chat": {
        **{"num_hidden_layers": 48, "hidden_size": 3200, "intermediate_size": 12800},
        **{"num_attention_heads": 25, "image_size": 224, "patch_size": 14, "hidden_act": "gelu"},
        **{"qkv_bias": False, "qk_normalization": True},
        **{"norm_type": "rms_norm", "layer_norm_eps": 1e-6},
    },
}
"""Those of internvl_chat are from the configuration class in OpenGVLab's own code."""
