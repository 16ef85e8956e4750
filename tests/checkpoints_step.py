"""Small random checkpoints of the Step3 families, under their published names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from actors.models.tensors import Dummy
from tests.checkpoints_tiles import scatter

PERCEPTION = {
    "width": 64,
    "layers": 3,
    "heads": 4,
    "image_size": 112,
    "patch_size": 14,
    "mlp_ratio": 2.5,
}
"""A whole view has 8 x 8 patches and four tokens, a crop 4 x 4 patches and one token."""

TEXT = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_attention_groups": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "layer_types": ["full_attention"],
    "mlp_layer_types": ["dense"],
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
STEP3 = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "output_hidden_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 112,
    "patch_size": 14,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-05,
    "model_type": "step3_vision_encoder",
}
PROCESSOR = {
    "size": {"height": 112, "width": 112},
    "patch_size": 56,
    "max_image_size": 448,
    "image_mean": [0.5, 0.4, 0.6],
    "image_std": [0.25, 0.3, 0.2],
    "resample": 2,
}


def write_step3p7(folder: Path) -> Any:
    """Writes a whole Step-3.7 in float32 with a random tower; returns transformers' model of it."""
    from transformers import Step3p7Config, Step3p7ForConditionalGeneration

    torch.manual_seed(0)
    positions = {"max_position_embeddings": 64}
    config = Step3p7Config(vision_config=PERCEPTION | positions, text_config=TEXT)
    model = Step3p7ForConditionalGeneration(config).eval()
    scatter(model.model.vision_model)
    scatter(model.model.multi_modal_projector)
    model.save_pretrained(folder, max_shard_size="100KB")
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return model


def write_step3vl10b(folder: Path) -> Any:
    """The same weights with a config.json like Step3-VL-10B's."""
    model = write_step3p7(folder)
    vision = PERCEPTION | {
        "model_type": "perception_encoder",
        "hidden_act": "quick_gelu",
        "ues_cls_token": False,
        "use_ln_pre": True,
        "use_ln_post": False,
        "use_abs_posemb": True,
        "use_rope2d": True,
        "ls_init_value": 0.1,
    }
    config = {
        "model_type": "step_robotics",
        "projector_bias": False,
        "text_config": TEXT,
        "understand_projector_stride": 2,
        "vision_config": vision,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return model


def write_step3(folder: Path) -> dict[str, Tensor]:
    """Writes the vision half of a Step3 in float32 with random weights, and returns them."""
    width, mlp_width, first = 64, 96, 40
    shapes: dict[str, tuple[int, ...]] = {
        "vision_model.embeddings.class_embedding": (1, width),
        "vision_model.embeddings.patch_embedding.weight": (width, 3, 14, 14),
        "vision_model.embeddings.patch_embedding.bias": (width,),
        "vision_model.embeddings.position_embedding.weight": (65, width),
        "vit_downsampler.weight": (first, width, 2, 2),
        "vit_downsampler.bias": (first,),
        "vit_downsampler2.weight": (2 * first, first, 3, 3),
        "vit_downsampler2.bias": (2 * first,),
        "vit_large_projector.weight": (48, 2 * first),
        "vit_large_projector.bias": (48,),
        "model.embed_tokens.weight": (64, 48),
    }
    for layer in range(3):
        block = f"vision_model.transformer.layers.{layer}"
        for name, shape in {
            "self_attn.qkv_proj": (3 * width, width),
            "self_attn.out_proj": (width, width),
            "mlp.fc1": (mlp_width, width),
            "mlp.fc2": (width, mlp_width),
            "layer_norm1": (width,),
            "layer_norm2": (width,),
        }.items():
            shapes |= {f"{block}.{name}.weight": shape, f"{block}.{name}.bias": shape[:1]}
    weights = dict(Dummy(shapes, 0, torch.device("cpu")))
    save_file(weights, folder / "model.safetensors")
    config = {
        "model_type": "step3_vl",
        "projector_bias": True,
        "text_config": {"hidden_size": 48, "model_type": "step3_text"},
        "understand_projector_stride": 2,
        "vision_config": STEP3,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return weights
