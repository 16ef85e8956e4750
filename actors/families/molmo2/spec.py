"""Molmo 2: transformers.models.molmo2."""

from __future__ import annotations

from actors.spec.checkpoint import Json
from actors.spec.model_spec import ModelSpec
from actors.spec.sampling import UpToFps
from actors.spec.settings import HALVES, ModelSource, only, side, tile_sides
from actors.spec.tiles import OverlappingTiles
from actors.spec.video import PooledWindows

LAYERS = [24, 18]
"""transformers' default of the layers whose features are pooled."""


def molmo2(source: ModelSource) -> ModelSpec:
    processor, adapter = source.image_processor(HALVES, "bilinear"), source.config["adapter_config"]
    vision = vision_of(source)
    fixed = {"hidden_act": "silu", "attention_bias": True, "mlp_bias": False}
    only(adapter, fixed | {"pooling_attention_mask": True}, "adapter_config")
    only(vision, {"hidden_act": "gelu_pytorch_tanh", "attention_bias": True}, "vision_config")
    only(adapter, {"hidden_size": vision["hidden_size"]}, "adapter_config")
    for settings, whose in ((vision, "vision_config"), (adapter, "adapter_config")):
        heads = int(settings["num_attention_heads"])
        size = {"num_key_value_heads": heads, "head_dim": int(settings["hidden_size"]) // heads}
        only(settings, size, whose)
    sizes = tile_sides(vision, processor)
    only(processor, {"patch_size": sizes["patch_size"]}, "the image processor")
    left, right = processor.get("overlap_margins") or (4, 4)
    sizing = OverlappingTiles(
        **sizes,
        merge_size=1,
        max_tiles=int(processor.get("max_crops") or 8),
        window=side(processor.get("pooling_size") or 2),
        margins=(int(left), int(right)),
    )
    if sizing.step_patches < 1:
        raise ValueError(f"overlap_margins: {[left, right]} leave nothing of a crop")
    vision |= {
        f"adapter_{key}": adapter[key] for key in ("num_attention_heads", "intermediate_size")
    }
    width = int(adapter.get("text_hidden_size") or source.text_width)
    model = source.spec("molmo2", processor, vision, sizing, width, resample="bilinear")
    settings = source.video_processor()
    only(settings, {"patch_size": sizing.patch_size}, "the video processor")
    if side(settings.get("size") or sizing.tile_pixels) != sizing.tile_pixels:
        raise ValueError(
            f"size of the video processor: only the tower's {sizing.tile_pixels} is supported"
        )
    most, fps = int(settings.get("num_frames") or 64), float(settings.get("max_fps") or 2)
    window = side(settings.get("pooling_size") or 3)
    if window < sizing.window:
        raise ValueError(
            "pooling_size of the video processor: only that of images, or more, is supported"
        )
    frames = PooledWindows(
        *(UpToFps(most, fps, max_fps=fps), sizing.patch_size, 1, 1),
        picture_pixels=sizing.tile_pixels,
        window=window,
        tile_tokens=sizing.tile_tokens,
    )
    return source.with_video(model, frames, "bilinear")


def vision_of(source: ModelSource) -> Json:
    """`vision_config`, or the published `vit_config`, whose checkpoints lack the last layers.
    Includes the layers whose features are pooled, in their order."""
    config, adapter = source.config, source.config["adapter_config"]
    stated = "vision_config" in config
    given = config["vision_config" if stated else "vit_config"]
    vision: Json = source.vision_defaults | given
    for name, published in (
        ("image_size", "image_default_input_size"),
        ("patch_size", "image_patch_size"),
    ):
        vision[name] = vision.get(published, vision[name])
    depth = int(vision["num_hidden_layers"])
    features = adapter.get("vision_feature_layer") or adapter.get("vit_layers") or LAYERS
    if not all(-depth <= layer < depth for layer in features):
        raise ValueError(f"vit_layers: {features} are not of {depth} layers")
    layers = [layer % depth for layer in features]
    seen = sorted(set(layers))
    if not stated:
        vision["num_hidden_layers"] = seen[-1] + 1
    return vision | {
        **{"used_layers": seen[-1] + 1, "taps": seen[:-1]},
        "features": [seen.index(layer) for layer in layers],
    }


MODEL_TYPES = {"molmo2": molmo2}
REFUSED = {"molmo": "its files are for code of its own, which transformers does not have"}
TOWER: Json = {
    **{"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 25},
    **{"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 72, "image_size": 378},
    **{"patch_size": 14, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
}
VISION_DEFAULTS = {"molmo2": TOWER}
