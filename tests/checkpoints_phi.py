"""Small random checkpoints of Phi-4-multimodal, as transformers and as its own code write them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from actors.families.phi4_multimodal.tower import PUBLISHED
from tests.checkpoints_clip import TOWER, written
from tests.checkpoints_tiles import scatter

SIDE = 56
"""Four tokens a picture."""


def write_phi4(folder: Path, used: int = -2) -> Any:
    """Writes a whole model in float32 with a random tower; returns transformers' module for
    images."""
    from transformers import Phi4MultimodalConfig, Phi4MultimodalForCausalLM

    torch.manual_seed(0)
    audio = {
        **{"hidden_size": 16, "intermediate_size": 16, "num_blocks": 1, "num_attention_heads": 2},
        **{"ext_pw_out_channel": 16, "depthwise_separable_out_channel": 16},
        **{"nemo_conv_channels": 16, "input_size": 16, "bias_max_distance": 4},
    }
    config = Phi4MultimodalConfig(
        vision_config=TOWER
        | {"image_size": SIDE, "crop_size": SIDE, "feature_layer": used, "image_token_id": 5},
        audio_config=audio,
        **{"hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 1},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256},
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    )
    model = Phi4MultimodalForCausalLM(config).eval()
    embed = model.model.embed_tokens_extend.image_embed
    # transformers' SDPA attends causally here where no patch of a batch is padding.
    embed.img_processor.set_attn_implementation("eager")
    scatter(embed)
    square = {"size": {"height": SIDE, "width": SIDE}, "dynamic_hd": 6}
    written(folder, model, square)
    return embed


def write_phi4mm(folder: Path) -> Any:
    """The same weights under the names, and with the config.json, of its own code."""
    with tempfile.TemporaryDirectory() as native:
        embed = write_phi4(Path(native))
        shards = [load_file(shard) for shard in Path(native).glob("*.safetensors")]
    weights = {}
    for name, tensor in (pair for shard in shards for pair in shard.items()):
        for ours, published in PUBLISHED.items():
            name = name.replace(f".image_embed.{ours}", f".image_embed.{published}")
        weights[name] = tensor
    save_file(weights, folder / "model.safetensors")
    image = {
        **{"crop_size": SIDE, "embedding_cls": "tune_image", "hd_transform_order": "sub_glb"},
        **{"image_token_compression_cls": "avg_pool_2d", "projection_cls": "mlp"},
        **{"use_hd_transform": True, "with_learnable_separator": True},
    }
    config = {"model_type": "phi4mm", "hidden_size": 96, "embd_layer": {"image_embd_layer": image}}
    (folder / "config.json").write_text(json.dumps(config))
    settings = {"image_processor_type": "Phi4MMImageProcessor", "dynamic_hd": 6}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return embed
