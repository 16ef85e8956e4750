"""Small random checkpoints of Phi-4-multimodal, as transformers and as its own code write them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from actors.families.phi4_multimodal import audio
from actors.families.phi4_multimodal.tower import PUBLISHED
from tests.checkpoints_clip import TOWER, written
from tests.checkpoints_tiles import enlarge, scatter

SIDE = 56
"""An image has four tokens."""


MELS = 20
"""Mel bands of its sounds, which are halved to 10, 5 and 3."""
AUDIO = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_blocks": 3, "num_attention_heads": 2},
    **{"ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32},
    **{"nemo_conv_channels": 16, "input_size": MELS, "bias_max_distance": 4},
}


def write_phi4(folder: Path, used: int = -2) -> Any:
    """Writes a whole random model in float32; returns transformers' module for images."""
    return write_both(folder, used).image_embed


def write_both(folder: Path, used: int = -2) -> Any:
    """The same; returns transformers' modules for images and sounds."""
    from transformers import Phi4MultimodalConfig, Phi4MultimodalForCausalLM

    torch.manual_seed(0)
    config = Phi4MultimodalConfig(
        vision_config=TOWER
        | {"image_size": SIDE, "crop_size": SIDE, "feature_layer": used, "image_token_id": 5},
        audio_config=AUDIO,
        **{"hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 1},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256},
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    )
    model = Phi4MultimodalForCausalLM(config).eval()
    embed = model.model.embed_tokens_extend
    # transformers' SDPA attends causally here if no patch of a batch is padding.
    embed.image_embed.img_processor.set_attn_implementation("eager")
    scatter(embed)
    encoder = embed.audio_embed.encoder
    with torch.no_grad():  # frames are about 8
        encoder.encoder_embedding.global_mean.normal_(8, 1)
        encoder.encoder_embedding.global_invstd.uniform_(0.2, 0.4)
        encoder.relative_attention_bias_layer.bias_values.weight *= 10
        enlarge(encoder.embed)
    square = {"size": {"height": SIDE, "width": SIDE}, "dynamic_hd": 6}
    written(folder, model, square | {"feature_size": MELS})
    return embed


def write_phi4mm(folder: Path) -> Any:
    """The same weights with the names, and the config.json, of the model's own code."""
    return write_both_published(folder).image_embed


def write_both_published(folder: Path) -> Any:
    with tempfile.TemporaryDirectory() as native:
        embed = write_both(Path(native))
        shards = [load_file(shard) for shard in Path(native).glob("*.safetensors")]
    weights = {}
    for name, tensor in (pair for shard in shards for pair in shard.items()):
        for ours, published in PUBLISHED.items():
            name = name.replace(f".image_embed.{ours}", f".image_embed.{published}")
        if ".audio_embed." in name:
            for ours, published in audio.PUBLISHED.items():
                name = name.replace(f".{ours}.", f".{published}.")
        weights[name] = tensor
    save_file(weights, folder / "model.safetensors")
    image = {
        **{"crop_size": SIDE, "embedding_cls": "tune_image", "hd_transform_order": "sub_glb"},
        **{"image_token_compression_cls": "avg_pool_2d", "projection_cls": "mlp"},
        **{"use_hd_transform": True, "with_learnable_separator": True},
    }
    layers = {"image_embd_layer": image, "audio_embd_layer": {"embedding_cls": "audio"}}
    config = {"model_type": "phi4mm", "hidden_size": 96, "embd_layer": layers}
    encoder = {
        **{"attention_dim": 32, "attention_heads": 2, "linear_units": 48, "num_blocks": 3},
        **{"input_size": MELS, "nemo_conv_settings": {"conv_channels": 16}, "chunk_size": -1},
        "relative_attention_bias_args": {"t5_bias_max_distance": 4, "type": "t5"},
    }
    config["audio_processor"] = {"config": encoder, "name": "cascades"}
    (folder / "config.json").write_text(json.dumps(config))
    settings = {"image_processor_type": "Phi4MMImageProcessor", "dynamic_hd": 6}
    settings |= {"feature_size": MELS}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return embed
