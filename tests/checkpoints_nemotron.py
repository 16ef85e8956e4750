"""Small random checkpoints of Nemotron-H Omni under their published names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.checkpoints_clip import written
from tests.checkpoints_tiles import enlarge, scatter

PATCHES = {"min_num_patches": 48, "max_num_patches": 160}
TARGET = 40
"""Patches per video frame."""
MELS = 24
AUDIO = {
    **{"model_type": "parakeet_encoder", "hidden_size": 32, "intermediate_size": 48},
    **{"num_hidden_layers": 3, "num_attention_heads": 2, "conv_kernel_size": 5},
    **{"subsampling_conv_channels": 16, "num_mel_bins": MELS, "convolution_bias": False},
    **{"projection_hidden_size": 40, "projection_bias": False},
}
SETTINGS = PATCHES | {"video_target_num_patches": TARGET}


def write_nemotron(folder: Path, *, predicts: bool = False, biased: bool = False) -> Any:
    """Writes a whole model in float32 with random towers; returns transformers' model of it.
    `predicts`: the language model has multi-token prediction, and the vision tower a final norm.
    `biased`: layers of the audio tower have biases."""
    from transformers import NemotronH_Omni_Reasoning_V3, NemotronH_Omni_Reasoning_V3_Config

    torch.manual_seed(0)
    text = {
        **{"model_type": "nemotron_h", "hidden_size": 96, "intermediate_size": 32},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24},
        **{"layers_block_type": ["mlp"], "num_nextn_predict_layers": int(predicts)},
        **{"mamba_num_heads": 2, "mamba_head_dim": 8, "n_groups": 1, "vocab_size": 64},
    }
    vision = {
        **{"model_type": "radio", "hidden_size": 64, "num_hidden_layers": 3},
        **{"num_attention_heads": 4, "mlp_ratio": 2.0, "max_img_size": 128},
        "video_temporal_patch_size": 2,
    }
    config = NemotronH_Omni_Reasoning_V3_Config(
        **{"vision_config": vision, "text_config": text},
        audio_config=AUDIO
        | dict.fromkeys(("attention_bias", "convolution_bias", "projection_bias"), biased),
        **{"vision_hidden_size": 64, "projector_hidden_size": 80},
    )
    model = NemotronH_Omni_Reasoning_V3(config).eval()
    scatter(model.multi_modal_projector)
    scatter(model.vision_model.embeddings)
    for layer in model.vision_model.encoder.layer:
        for part in (layer.norm1, layer.attention, layer.norm2, layer.mlp):
            scatter(part)
    if predicts:
        scatter(model.vision_final_layernorm)
    scatter(model.audio_tower)
    scatter(model.embed_audio)
    enlarge(model.audio_tower.subsampling)
    for name, values in model.audio_tower.named_buffers():
        if name.endswith("running_mean"):
            values.normal_(0, 0.1)
        elif name.endswith("running_var"):
            values.uniform_(0.05, 0.2)
    written(folder, model, SETTINGS)
    return model
