"""Small random checkpoints of the tile families, under their published names."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

TEXT = {
    "model_type": "qwen2",
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
INTERNVL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": [84, 84],
    "patch_size": [14, 14],
}
"""Nine tokens per tile."""

TOWERS = {
    "300M": INTERNVL | {"attention_bias": True, "norm_type": "layer_norm"},
    "6B": INTERNVL | {"attention_bias": False, "norm_type": "rms_norm", "use_qk_norm": True},
}
PROCESSOR = {
    "crop_to_patches": False,
    "size": {"height": 84, "width": 84},
    "min_patches": 1,
    "max_patches": 12,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
    "resample": 3,
}
LLAMA4 = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 84,
    "patch_size": 14,
    "projector_input_dim": 80,
    "projector_output_dim": 80,
    "vision_output_dim": 80,
}
"""transformers' adapter needs an `intermediate_size` of four times `hidden_size`."""

LLAMA4_TEXT = {
    "hidden_size": 96,
    "intermediate_size": 64,
    "intermediate_size_mlp": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 2,
    "vocab_size": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA4_PROCESSOR = {
    "size": {"height": 84, "width": 84},
    "max_patches": 16,
    "resize_to_max_canvas": False,
    "image_mean": [0.5, 0.4, 0.6],
    "image_std": [0.5, 0.3, 0.25],
    "resample": 2,
}
MLLAMA = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 5,
    "num_global_layers": 3,
    "attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
    "intermediate_layers_indices": [1, 3],
    "vision_output_dim": 3 * 64,
}
MLLAMA_TEXT = {
    **{key: value for key, value in TEXT.items() if key != "model_type"},
    **{"num_hidden_layers": 2, "cross_attention_layers": [1]},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
MLLAMA_PROCESSOR = {
    "size": {"height": 56, "width": 56},
    "max_image_tiles": 4,
    "do_pad": True,
    "image_mean": [0.5, 0.4, 0.6],
    "image_std": [0.5, 0.3, 0.25],
    "resample": 2,
}

CHAT_NAMES = (
    (r"^multi_modal_projector\.layer_norm", "mlp1.0"),
    (r"^multi_modal_projector\.linear_1", "mlp1.1"),
    (r"^multi_modal_projector\.linear_2", "mlp1.3"),
    (r"^vision_tower\.", "vision_model."),
    (r"embeddings\.cls_token", "embeddings.class_embedding"),
    (r"embeddings\.patch_embeddings\.projection", "embeddings.patch_embedding"),
    (r"embeddings\.position_embeddings", "embeddings.position_embedding"),
    (r"encoder\.layer\.", "encoder.layers."),
    (r"\.attention\.projection_layer", ".attn.proj"),
    (r"\.attention\.", ".attn."),
    (r"\.layernorm_before", ".norm1"),
    (r"\.layernorm_after", ".norm2"),
    (r"\.lambda_(\d)", r".ls\1"),
)


def write_internvl(folder: Path, tower: str, kind: str = "InternVL") -> Any:
    """Writes a whole InternVL in float32 with a random tower; returns transformers' model of it.
    `kind`: prefix of transformers' classes, such as QianfanOCR."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vision_config=TOWERS[tower], text_config=TEXT, image_token_id=5
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    scatter(model.model.vision_tower)
    scatter(model.model.multi_modal_projector)
    model.save_pretrained(folder, max_shard_size="150KB")
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return model


def write_internvl_chat(folder: Path, tower: str) -> Any:
    """The same weights in `internvl_chat` format: its tensor names and config.json."""
    with tempfile.TemporaryDirectory() as native:
        model = write_internvl(Path(native), tower)
    vision = TOWERS[tower]
    config = {
        "model_type": "internvl_chat",
        "downsample_ratio": 0.5,
        "dynamic_image_size": True,
        "force_image_size": 84,
        "llm_config": TEXT,
        "max_dynamic_patch": 12,
        "min_dynamic_patch": 1,
        "ps_version": "v2",
        "select_layer": -1,
        "use_thumbnail": True,
        "vision_config": {
            **{key: vision[key] for key in ("hidden_size", "intermediate_size", "norm_type")},
            **{key: vision[key] for key in ("num_hidden_layers", "num_attention_heads")},
            "image_size": 84,
            "patch_size": 14,
            "layer_norm_eps": 1e-06,
            "model_type": "intern_vit_6b",
            "qk_normalization": "use_qk_norm" in vision,
            "qkv_bias": vision["attention_bias"],
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    clip = {"feature_extractor_type": "CLIPFeatureExtractor", "do_center_crop": True, "size": 84}
    settings = {key: PROCESSOR[key] for key in ("image_mean", "image_std", "resample")}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings | clip))
    save_file(chat_names(model.state_dict()), folder / "model.safetensors")
    return model


def write_llama4(folder: Path) -> Any:
    """Writes a whole Llama 4 in float32 with a random tower; returns transformers' model of it."""
    from transformers import Llama4Config, Llama4ForConditionalGeneration

    torch.manual_seed(0)
    config = Llama4Config(vision_config=LLAMA4, text_config=LLAMA4_TEXT)
    model = Llama4ForConditionalGeneration(config).eval()
    scatter(model.vision_model)
    scatter(model.multi_modal_projector)
    model.save_pretrained(folder, max_shard_size="150KB")
    (folder / "preprocessor_config.json").write_text(json.dumps(LLAMA4_PROCESSOR))
    return model


def write_mllama(folder: Path) -> Any:
    """Writes a whole Llama 3.2 Vision; returns transformers' model of it."""
    from transformers import MllamaConfig, MllamaForConditionalGeneration

    torch.manual_seed(0)
    config = MllamaConfig(vision_config=MLLAMA, text_config=MLLAMA_TEXT)
    model = MllamaForConditionalGeneration(config).eval()
    scatter(model.model.vision_model)
    scatter(model.model.multi_modal_projector)
    model.save_pretrained(folder, max_shard_size="150KB")
    (folder / "preprocessor_config.json").write_text(json.dumps(MLLAMA_PROCESSOR))
    return model


def write_gemma3(folder: Path) -> Any:
    """Writes a whole Gemma 3 in float32 with a random tower; returns transformers' model of it."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    torch.manual_seed(0)
    vision = INTERNVL | {"image_size": 112, "patch_size": 14, "vision_use_head": False}
    text = TEXT | {"model_type": "gemma3_text", "head_dim": 16, "pad_token_id": 0}
    config = Gemma3Config(
        vision_config=vision, text_config=text, mm_tokens_per_image=4, image_token_id=5
    )
    model = Gemma3ForConditionalGeneration(config).eval()
    scatter(model.model.vision_tower)
    scatter(model.model.multi_modal_projector)
    model.save_pretrained(folder, max_shard_size="150KB")
    settings = PROCESSOR | {"size": {"height": 112, "width": 112}, "resample": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return model


GEMMA_AUDIO: dict[str, Any] = {
    **{"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2},
    **{"subsampling_conv_channels": [16, 8], "output_proj_dims": 24},
    **{"attention_chunk_size": 4, "attention_context_left": 5, "attention_logit_cap": 0.5},
}


def write_gemma4(folder: Path, *, clipped: bool = False) -> Any:
    """The same for Gemma 4 with up to 70 tokens. `clipped`: like E2B and E4B, which take sounds."""
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    torch.manual_seed(0)
    vision = {key: INTERNVL[key] for key in ("hidden_size", "intermediate_size")}
    vision |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4}
    vision |= {"head_dim": 16, "patch_size": 4, "position_embedding_size": 640}
    text = {key: value for key, value in TEXT.items() if key != "model_type"}
    config = Gemma4Config(
        vision_config=vision | {"standardize": not clipped, "use_clipped_linears": clipped},
        text_config=text | {"head_dim": 16, "global_head_dim": 16, "vocab_size_per_layer_input": 8},
        audio_config=GEMMA_AUDIO if clipped else None,
        image_token_id=5,
    )
    model = Gemma4ForConditionalGeneration(config).eval()
    scatter(model.model.vision_tower)
    scatter(model.model.embed_vision)
    for name, values in model.model.vision_tower.named_buffers():
        if name.endswith(("_min", "_max")):
            values.copy_((0.4 + torch.rand(())) * (-1 if name.endswith("_min") else 1))
        elif name.startswith("std_"):
            values.copy_(1 + torch.rand_like(values))
    if clipped:
        scatter(model.model.audio_tower)
        scatter(model.model.embed_audio)
        enlarge(model.model.audio_tower.subsample_conv_projection)
        for name, values in model.model.audio_tower.named_buffers():
            if name.endswith(("_min", "_max")):
                values.copy_((1 + torch.rand(())) * (-1 if name.endswith("_min") else 1))
    model.save_pretrained(folder, max_shard_size="150KB")
    settings: dict[str, Any] = {
        "feature_size": GEMMA_AUDIO["subsampling_conv_channels"][0],
        "max_soft_tokens": 70,
        "patch_size": 4,
        "pooling_kernel_size": 3,
        "resample": 3,
    }
    settings |= {"do_normalize": False, "image_mean": [0.0] * 3, "image_std": [1.0] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return model


def chat_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of transformers' model as OpenGVLab publishes them, with q, k and v fused."""
    named: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        published = name.removeprefix("model.")
        for pattern, replacement in CHAT_NAMES:
            published = re.sub(pattern, replacement, published)
        if "q_proj" in published and published.startswith("vision_model."):
            parts = [weights[name.replace("q_proj", f"{one}_proj")] for one in "qkv"]
            named[published.replace("q_proj", "qkv")] = torch.cat(parts)
        elif not re.search("vision_model.*[kv]_proj", published):
            named[published] = tensor.clone()
    return named


def scatter(module: Any) -> None:
    """Randomises parameters far from their initial values, so that swapping any two shows."""
    with torch.no_grad():
        for values in module.parameters():
            values.normal_(0, 0.08) if values.dim() > 1 else values.add_(
                torch.randn_like(values) * 0.1
            )


def enlarge(module: Any, factor: float = 4) -> None:
    """Scales weights up, so that rows depend on the input."""
    with torch.no_grad():
        for values in module.parameters():
            if values.dim() > 1:
                values *= factor
