"""Phi-4-multimodal: transformers.models.phi4_multimodal, and its own code's names.

Its vision tower is SigLIP, its audio encoder a conformer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from actors.families.whisper.spec import SILENCE
from actors.spec.audio import at_16_khz
from actors.spec.checkpoint import Json
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import HALVES, ModelSource, layers_run, only, side, tower_pixels
from actors.spec.slices import PaddedCrops

MERGE = 2
"""Patches are averaged, 2 x 2 to one."""


def phi4_multimodal(source: ModelSource) -> ModelSpec:
    """Images, unless `model.tower` says otherwise. They are resized bilinearly, and a second time
    to the square of the whole image."""
    if source.options.tower == "audio":
        return sounds(source, source.config.get("audio_config") or {})
    vision, processor = source.vision, source.image_processor(HALVES)
    patch, pixels = side(vision["patch_size"]), tower_pixels(vision, processor.get("size"))
    only(vision, {"hidden_act": "gelu_pytorch_tanh", "crop_size": pixels}, "vision_config")
    only(processor, {"patch_size": patch}, "the image processor")
    if pixels % (patch * MERGE):
        raise ValueError("patch_size of vision_config: only even numbers of patches are supported")
    depth, layer = int(vision["num_hidden_layers"]), int(vision["feature_layer"])
    (used,) = layers_run(layer, depth, "feature_layer")
    sizing = PaddedCrops(
        patch_size=patch,
        merge_size=MERGE,
        picture_pixels=pixels,
        max_crops=int(processor.get("dynamic_hd") or 36),
    )
    family, width = source.config["model_type"], source.config["hidden_size"]
    vision |= {"used_layers": used}
    return source.spec(
        *(family, processor, vision, sizing, width), folder="phi4_multimodal", resample="bilinear"
    )


def phi4mm(source: ModelSource) -> ModelSpec:
    """microsoft/Phi-4-multimodal-instruct as published. The tower's sizes are in its own code."""
    if source.options.tower == "audio":
        return sounds(source, published_encoder(source.config))
    given = source.config["embd_layer"]["image_embd_layer"]
    fixed = {
        **{"embedding_cls": "tune_image", "hd_transform_order": "sub_glb"},
        **{"image_token_compression_cls": "avg_pool_2d", "projection_cls": "mlp"},
        **{"use_hd_transform": True, "with_learnable_separator": True},
    }
    only(given, fixed, "image_embd_layer")
    only(source.config, {"img_processor": None}, "config.json")
    vision = {"crop_size": given["crop_size"]}
    return phi4_multimodal(replace(source, config=source.config | {"vision_config": vision}))


def sounds(source: ModelSource, config: Json) -> ModelSpec:
    """`config`: that of the audio encoder, with transformers' keys."""
    encoder = ENCODER | config
    width, mels = int(encoder["hidden_size"]), int(encoder["input_size"])
    only(encoder, FIXED | dict.fromkeys(CHANNELS, width), "the audio encoder")
    source.feature_extractor(mels, EXTRACTOR)
    sizing = at_16_khz(
        mels=mels,
        window_frames=WINDOW * 2**HALVINGS,
        most_seconds=math.inf,
        halvings=HALVINGS,
        features="phi4",
        less=240,
    )
    family, rows = source.config["model_type"], source.config["hidden_size"]
    model = source.spec(family, SILENCE, encoder, sizing, rows, folder="phi4_multimodal")
    return replace(model, fast_blocks=None)


def published_encoder(config: Json) -> Json:
    """The audio encoder's configuration with transformers' keys."""
    layer = {"compression_rate": 8, "downsample_rate": 1, "projection_cls": "mlp"}
    layer |= {"use_conv_downsample": False, "use_qformer": False, "embedding_cls": "audio"}
    only(config["embd_layer"]["audio_embd_layer"], layer, "audio_embd_layer")
    given = config["audio_processor"]["config"]
    fixed = {"causal": True, "batch_norm": False, "bias_in_glu": True, "ext_pw_kernel_size": 1}
    only(given, fixed | {"input_layer": "nemo_conv"}, "audio_processor")
    biases = given["relative_attention_bias_args"]
    only(biases, {"type": "t5"}, "relative_attention_bias_args")
    encoder: Json = given | {
        "hidden_size": given["attention_dim"],
        "num_attention_heads": given["attention_heads"],
        "intermediate_size": given["linear_units"],
        "nemo_conv_channels": given["nemo_conv_settings"]["conv_channels"],
        "bias_max_distance": biases["t5_bias_max_distance"],
    }
    return encoder


MODEL_TYPES = {"phi4_multimodal": phi4_multimodal, "phi4mm": phi4mm}
REFUSED = {"phi3_v": "its files are for code of its own, which transformers does not have"}
WINDOW = 500
"""Positions that attend to each other: longer sounds are cut, after their convolutions."""
HALVINGS = 3
ENCODER: Json = {
    **{"hidden_size": 1024, "intermediate_size": 1536, "num_blocks": 24},
    **{"num_attention_heads": 16, "kernel_size": 3, "input_size": 80},
    **{"bias_max_distance": 1000, "nemo_conv_channels": 1024},
}
"""transformers' defaults for keys that `audio_config` lacks."""
FIXED: Json = {
    **dict.fromkeys(("activation", "conv_activation", "conv_glu_type"), "swish"),
    **{"nemo_activation": "relu", "time_reduction": 2**HALVINGS, "depthwise_multiplier": 1},
    **{"chunk_size": -1, "bias_symmetric": False, "downsample_rate": 1},
}
CHANNELS = (
    *("ext_pw_out_channel", "depthwise_separable_out_channel"),
    "depthwise_seperable_out_channel",
)
"""Keys whose values must be the width. The last is from the published files."""
EXTRACTOR: Json = {
    **{"sampling_rate": 16000, "hop_length": 160, "n_fft": 512, "win_length": 400},
    **{"preemphasis": 0.97, "mel_min_frequency": 0, "mel_max_frequency": 7690},
    **{"audio_compression_rate": 8, "audio_downsample_rate": 1, "audio_feat_stride": 1},
}
TOWER: Json = {
    **{"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27},
    **{"num_attention_heads": 16, "image_size": 448, "patch_size": 14, "crop_size": 448},
    **{"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "feature_layer": -2},
}
VISION_DEFAULTS: Mapping[str, Json] = dict.fromkeys(MODEL_TYPES, TOWER)
