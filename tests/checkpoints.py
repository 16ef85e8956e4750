"""Small random checkpoints under their published names, as transformers writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from tests import checkpoints_kimi, moonvit
from tests.checkpoints_tiles import scatter

LAYERS = {"depth": 5, "num_heads": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
VISION = LAYERS | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "patch_size": 16,
    "out_hidden_size": 96,
    "num_position_embeddings": 2304,
}
TEXT = {
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "vocab_size": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 4, 4]},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
TOKENS = {
    "image_token_id": 2000,
    "video_token_id": 2001,
    "vision_start_token_id": 2002,
    "vision_end_token_id": 2003,
}
PROCESSOR = {
    "size": {"shortest_edge": 4096, "longest_edge": 1048576},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.4, 0.6],
    "image_std": [0.5, 0.3, 0.25],
}


@dataclass(frozen=True)
class Checkpoint:
    name: str
    """The prefix of transformers' Config and ForConditionalGeneration classes."""
    vision: Mapping[str, Any]
    text: Mapping[str, Any] = field(default_factory=dict)
    processor: Mapping[str, Any] = field(default_factory=lambda: PROCESSOR)
    image_processor: str = "qwen2_vl.Qwen2VL"
    """Its folder in transformers, and the prefix of its ImageProcessorPil class."""
    model: str = ""
    """The prefix of its ForConditionalGeneration class, if that differs."""
    top: Mapping[str, Any] = field(default_factory=dict)
    """Further top-level keys of its configuration."""


SMALL = VISION | {"patch_size": 14, "intermediate_size": 120}
CLIP = PROCESSOR | {
    "patch_size": 14,
    "min_pixels": 3136,
    "max_pixels": 1003520,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
GLM = LAYERS | {
    "hidden_size": 64,
    "out_hidden_size": 96,
    "intermediate_size": 120,
    "patch_size": 14,
    "image_size": 336,
}
GLM_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "rope_parameters": {  # half of a head is rotated
        "rope_type": "default",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 2, 2],
    },
}
GLM_PROCESSOR = PROCESSOR | {
    "patch_size": 14,
    "size": {"shortest_edge": 12544, "longest_edge": 2000000},
}
LATENT = {
    **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 24, "v_head_dim": 24},
    **{"index_n_heads": 2, "index_head_dim": 16, "linear_num_heads": 2, "linear_head_dim": 16},
    **{"num_key_value_heads": 4, "rope_parameters": None, "pad_token_id": None},
}
PADDLE = "paddleocr_vl"
VIDEO_LLAMA = "video_llama_3"
DEEPSTACK = VISION | {"deepstack_visual_indexes": [1, 2, 3]}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}

CHECKPOINTS = {
    "qwen3_vl": Checkpoint("Qwen3VL", DEEPSTACK),
    "qwen3_vl_moe": Checkpoint("Qwen3VLMoe", DEEPSTACK, EXPERTS),
    "qwen3_5": Checkpoint("Qwen3_5", VISION, LINEAR),
    "qwen3_5_moe": Checkpoint("Qwen3_5Moe", VISION, LINEAR | EXPERTS),
    "qwen2_vl": Checkpoint(
        "Qwen2VL",
        LAYERS | {"embed_dim": 64, "mlp_ratio": 2, "hidden_size": 96, "patch_size": 14},
        processor=CLIP,
    ),
    "qwen2_5_vl": Checkpoint(
        "Qwen2_5_VL", SMALL | {"window_size": 112, "fullatt_block_indexes": [1, 4]}, processor=CLIP
    ),
    "exaone4_5": Checkpoint(
        "Exaone4_5_",
        SMALL | {"num_key_value_heads": 2, "window_size": 112, "fullatt_block_indexes": [1, 4]},
        {"model_type": "exaone4"},
        processor=CLIP,
    ),
    "glm4v": Checkpoint("Glm4v", GLM, {}, GLM_PROCESSOR, "glm4v.Glm4v"),
    "glm4v_moe": Checkpoint("Glm4vMoe", GLM, GLM_EXPERTS, GLM_PROCESSOR, "glm4v.Glm4v"),
    "glm46v": Checkpoint(
        "Glm46V",
        GLM | {"model_type": "glm4v_vision"},
        {"model_type": "glm4v_text"},
        GLM_PROCESSOR,
        "glm46v.Glm46V",
    ),
    "glm_ocr": Checkpoint(
        "GlmOcr", GLM | {"intermediate_size": 120}, {}, GLM_PROCESSOR, "glm46v.Glm46V"
    ),
    "glm5_next": Checkpoint(
        "Glm5Next",
        GLM | {"projection_intermediate_size": 160},
        GLM_EXPERTS | LATENT,
        GLM_PROCESSOR | {"min_image_tokens": 16, "max_image_tokens": 1200},
        "glm5_next.Glm5Next",
    ),
    "hunyuan_vl": Checkpoint(
        "HunYuanVL",
        {
            **{"hidden_size": 64, "intermediate_size": 120, "num_hidden_layers": 5},
            **{"num_attention_heads": 4, "patch_size": 14, "max_image_size": 112},
        },
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3] * 4}},
        CLIP | {"temporal_patch_size": 1},
        "hunyuan_vl.HunYuanVL",
    ),
    "minimax_m3_vl": Checkpoint(
        "MiniMaxM3VL",
        {
            **{"hidden_size": 80, "intermediate_size": 120, "num_hidden_layers": 5},
            **{"num_attention_heads": 4, "patch_size": 14},
        },
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rotary_dim": 24},
        CLIP,  # its own image processor has the same rules but no Pillow backend
        model="MiniMaxM3Sparse",
        top={"projector_hidden_size": 72},
    ),
    "ernie4_5_vl_moe": Checkpoint(
        "Ernie4_5_VLMoe",
        {"depth": 5, "num_heads": 4, "hidden_size": 64, "intermediate_size": 128},
        {"moe_intermediate_size": [64, 64], "moe_num_experts": 4, "moe_k": 2},
        {key: value for key, value in CLIP.items() if not key.endswith("_pixels")}
        | {"temporal_patch_size": 1, "size": {"shortest_edge": 3136, "longest_edge": 1003520}},
        "ernie4_5_vl_moe.Ernie4_5_VLMoe",
    ),
    PADDLE: Checkpoint(
        "PaddleOCRVL",
        {
            **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3},
            **{"num_attention_heads": 4, "image_size": 84, "patch_size": 14},
            "spatial_merge_size": 2,
        },
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        CLIP | {"temporal_patch_size": 1},
        "paddleocr_vl.PaddleOCRVL",
    ),
    VIDEO_LLAMA: Checkpoint(
        "VideoLlama3",
        {
            **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3},
            **{"num_attention_heads": 4, "patch_size": 14},
        },
        {"model_type": "qwen2"},
        CLIP | {"temporal_patch_size": 1, "merge_size": 1},
        "video_llama_3.VideoLlama3",
    ),
}

KIMI = "kimi_vl"
"""Not in transformers; see tests/moonvit.py."""

KIMI_K25 = "kimi_k25"
"""Its model is built differently; see tests/checkpoints_kimi.py."""

MODEL_TYPES = (*CHECKPOINTS, KIMI, KIMI_K25)


def write(folder: Path, model_type: str, *, max_shard_size: str = "300KB") -> Any:
    """Writes a whole model in float32 with a random tower; returns the reference model."""
    if model_type == KIMI:
        return moonvit.write(folder)
    if model_type == KIMI_K25:
        return checkpoints_kimi.write(folder)
    return write_made(folder, CHECKPOINTS[model_type], max_shard_size)


def write_made(folder: Path, made: Checkpoint, max_shard_size: str = "300KB") -> Any:
    """`write` for a checkpoint that is not in CHECKPOINTS."""
    import transformers

    torch.manual_seed(0)
    # A copy, because transformers writes into what it is given.
    text = deepcopy(TEXT | dict(made.text))
    config = getattr(transformers, f"{made.name}Config")(
        vision_config=dict(made.vision), text_config=text, **TOKENS, **made.top
    )
    kind = f"{made.model or made.name}ForConditionalGeneration"
    model = getattr(transformers, kind)(config).eval()
    for name, part in model.model.named_children():
        if name != "language_model":
            scatter(part)
    if made.name == "Glm5Next":  # so that its clamps matter
        for name, values in model.model.visual.named_parameters():
            if ".gate_proj." in name or ".up_proj." in name:
                values.data *= 20
            elif ".down_proj." in name:
                values.data /= 100
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    (folder / "preprocessor_config.json").write_text(json.dumps(made.processor))
    return model


def write_qwen3vl(folder: Path, *, moe: bool = False, max_shard_size: str = "300KB") -> Any:
    return write(folder, "qwen3_vl_moe" if moe else "qwen3_vl", max_shard_size=max_shard_size)


def processor(model_type: str) -> Any:
    """The family's own image processor, with the settings of the checkpoint."""
    if model_type == KIMI:
        return moonvit.processor
    if model_type == KIMI_K25:
        return checkpoints_kimi.processor
    made = CHECKPOINTS[model_type]
    package, name = made.image_processor.split(".")
    module = import_module(f"transformers.models.{package}.image_processing_pil_{package}")
    return getattr(module, f"{name}ImageProcessorPil")(**made.processor)
