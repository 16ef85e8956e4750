"""Presets with smaller towers: folders of JSON files, for random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from actors.spec.checkpoint import Preset

LAYERS = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}
SMALL: dict[str, dict[str, Any]] = {
    "qwen2vl-7b": {"depth": 3, "embed_dim": 64, "num_heads": 4, "hidden_size": 96},
    "qwen25vl-7b": {
        **{"depth": 3, "hidden_size": 64, "num_heads": 4, "intermediate_size": 100},
        **{"out_hidden_size": 96, "fullatt_block_indexes": [1]},
    },
    "exaone45-33b": {
        **{"depth": 3, "hidden_size": 64, "num_heads": 4, "num_key_value_heads": 2},
        **{"intermediate_size": 100, "out_hidden_size": 96, "fullatt_block_indexes": [1]},
    },
    "qwen35-27b": {
        **{"depth": 3, "hidden_size": 64, "num_heads": 4, "intermediate_size": 128},
        "out_hidden_size": 96,
    },
    "glm41v-9b": {
        **{"depth": 3, "hidden_size": 64, "num_heads": 4, "intermediate_size": 160},
        "out_hidden_size": 96,
    },
    "glm-ocr": {
        **{"depth": 3, "hidden_size": 64, "num_heads": 4, "intermediate_size": 160},
        "out_hidden_size": 96,
    },
    "glm53-flash": {
        **{"depth": 3, "hidden_size": 64, "num_heads": 4, "intermediate_size": 160},
        **{"out_hidden_size": 96, "projection_intermediate_size": 160},
    },
    "hunyuan-ocr": LAYERS | {"intermediate_size": 128, "max_image_size": 448},
    "minimax-m3": LAYERS | {"intermediate_size": 128},
    "ernie45vl-28b": {"depth": 3, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2},
    "kimivl-a3b": LAYERS | {"intermediate_size": 128},
    "internvl3-8b": LAYERS | {"intermediate_size": 128, "image_size": [84, 84]},
    "internvl3-78b": LAYERS | {"intermediate_size": 128, "image_size": 84},
    "llama4-scout": LAYERS
    | {"intermediate_size": 256, "image_size": 84, "projector_input_dim": 80}
    | {"projector_output_dim": 80, "vision_output_dim": 80},
    "llama32-vision-11b": {
        **{"hidden_size": 64, "attention_heads": 4, "intermediate_size": 128},
        **{"num_hidden_layers": 3, "num_global_layers": 2, "image_size": 56},
        **{"intermediate_layers_indices": [1], "vision_output_dim": 128},
    },
    "gemma3-4b": LAYERS | {"intermediate_size": 128, "image_size": 224},
    "kimik25": {
        **{f"vt_{key}": value for key, value in LAYERS.items()},
        "vt_intermediate_size": 128,
    },
    "pixtral-12b": LAYERS | {"intermediate_size": 128},
    "mistral-small31": LAYERS | {"intermediate_size": 128},
    "lighton-ocr": LAYERS | {"intermediate_size": 128},
    "minicpmv-4.6": LAYERS | {"num_hidden_layers": 9, "intermediate_size": 128},
    "lfm25vl-1.6b": LAYERS | {"intermediate_size": 128},
    "paddleocr-vl": LAYERS | {"intermediate_size": 128},
    "videollama3-7b": LAYERS | {"intermediate_size": 128},
    "gemma4-31b": LAYERS
    | {"intermediate_size": 128, "num_key_value_heads": 4, "head_dim": 16}
    | {"position_embedding_size": 1024},
    "siglip-so400m": LAYERS | {"intermediate_size": 128, "image_size": 90},
    "siglip2-base-naflex": LAYERS | {"intermediate_size": 128},
    "clip-vit-l-336": LAYERS | {"intermediate_size": 128, "image_size": 84},
    "dinov2-base": LAYERS | {"mlp_ratio": 2, "image_size": 84},
    "dinov3-vitb16": LAYERS | {"intermediate_size": 128},
    "aimv2-large-224": LAYERS | {"intermediate_size": 128, "image_size": 84},
    "mlcd-bigg-448": LAYERS | {"intermediate_size": 128, "image_size": 84},
    "llava15-7b": LAYERS | {"intermediate_size": 128, "image_size": 84},
    "llava-next-7b": LAYERS | {"intermediate_size": 128, "image_size": 84},
    "llava-next-video-7b": LAYERS | {"intermediate_size": 128, "image_size": 84},
    "granite-vision-4.1-4b": LAYERS | {"intermediate_size": 128, "image_size": 128},
    "phi4-multimodal": LAYERS | {"intermediate_size": 128, "image_size": 56, "crop_size": 56},
    "molmo2-4b": LAYERS
    | {"intermediate_size": 128, "num_key_value_heads": 4, "head_dim": 16}
    | {"image_default_input_size": [98, 98]},
    "nemotron-3-nano-omni": LAYERS | {"mlp_ratio": 2.0, "max_img_size": 256},
    "llava-onevision-7b": LAYERS | {"intermediate_size": 128, "image_size": 90},
    "paligemma2-3b": LAYERS | {"intermediate_size": 128, "image_size": 84},
    "janus-pro-1b": LAYERS | {"mlp_ratio": 2.0, "image_size": 96, "projection_dim": 96},
    "aya-vision-8b": LAYERS | {"intermediate_size": 128, "image_size": 84},
    "command-a-vision": LAYERS | {"intermediate_size": 128, "image_size": 96},
    "ovis2-2b": LAYERS | {"intermediate_size": 128, "image_size": 84, "vocab_size": 128},
    "smolvlm2-2b": LAYERS | {"intermediate_size": 128, "image_size": 90},
    "deepseek-ocr2": {
        "sam_config": {
            **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
            **{"global_attn_indexes": [1], "downsample_channels": [32, 64], "image_size": 1024},
        },
        "encoder_config": {
            **{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
            **{"num_key_value_heads": 2, "intermediate_size": 96, "rms_norm_eps": 1e-6},
        },
    },
    "step3vl-10b": {"width": 64, "heads": 4, "layers": 3, "mlp_ratio": 2, "image_size": 224},
    "step3-321b": LAYERS | {"intermediate_size": 128, "output_hidden_size": 72, "image_size": 224},
}
"""Changes to `vision_config`."""

TOP_LEVEL: dict[str, dict[str, Any]] = {
    "gemma3-4b": {"mm_tokens_per_image": 16},
    "internvl3-78b": {"force_image_size": 84},
    "granite-vision-4.1-4b": {"deepstack_layer_map": [[-3, 9], [-2, 6], [-1, 0]]},
    "molmo2-4b": {
        "adapter_config": {
            **{"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128},
            **{"text_hidden_size": 96, "vit_layers": [-2, -3]},
        }
    },
    "nemotron-3-nano-omni": {"vit_hidden_size": 64, "projector_hidden_size": 128},
    "minimax-m3": {"projector_hidden_size": 80},
    "aya-vision-8b": {"alignment_intermediate_size": 128},
    "lfm25vl-1.6b": {"projector_hidden_size": 128},
    "command-a-vision": {"alignment_intermediate_size": 128},
}
SIZES = {
    **{"internvl3-8b": 84, "internvl3-78b": 84, "llama4-scout": 84, "gemma3-4b": 224},
    "llama32-vision-11b": 56,
    **{"siglip-so400m": 90, "clip-vit-l-336": 84, "llava15-7b": 84, "llava-next-7b": 84},
    **{"llava-next-video-7b": 84, "llava-onevision-7b": 90, "paligemma2-3b": 84},
    **{"aya-vision-8b": 84, "granite-vision-4.1-4b": 128, "phi4-multimodal": 56},
    "molmo2-4b": 98,
    **{"command-a-vision": 96, "janus-pro-1b": 96, "dinov3-vitb16": 96},
    **{"ovis2-2b": 84, "mlcd-bigg-448": 84, "aimv2-large-224": 84},
}
LONGEST = dict.fromkeys(("pixtral-12b", "mistral-small31", "lighton-ocr"), 448) | {
    "smolvlm2-2b": 180
}
"""Presets whose `longest_edge` is a side; in the others it is an area."""

ROW_WIDTH = 96
"""The language model's width, smaller so that the heads do not outweigh the tower."""


def write_small(folder: Path, preset: str) -> Path:
    """A folder with the JSON files of a preset whose tower is small."""
    files = Preset(preset).files
    config = files["config.json"]
    # DINO's config.json is that of its tower.
    vision = config.get("vision_config") or config.get("vit_config", config)
    whole = vision.get("image_size")
    vision |= SMALL[preset]
    config |= TOP_LEVEL.get(preset, {})
    for text in config.keys() & {"text_config", "llm_config"}:
        config[text]["hidden_size"] = ROW_WIDTH
    if vision is not config:
        config |= dict.fromkeys(config.keys() & {"hidden_size", "projection_dim"}, ROW_WIDTH)
    processor: Any = files.get("preprocessor_config.json")
    if side := SIZES.get(preset):
        for settings in (processor, files.get("video_preprocessor_config.json", {})):
            settings["size"] = side
        if "crop_size" in processor:
            processor["crop_size"] = side
    if "overlap_margins" in (processor or {}):
        processor["overlap_margins"] = [2, 2]
    for settings in (config, processor or {}):
        if pinpoints := settings.get("image_grid_pinpoints"):
            smaller = [[each * vision["image_size"] // whole for each in one] for one in pinpoints]
            settings["image_grid_pinpoints"] = smaller
    if processor and "media_proc_cfg" in processor:
        processor["media_proc_cfg"]["in_patch_limit"] = 256
    if processor and "in_token_limit" in processor:
        processor["in_token_limit"] = 256
    if processor and "max_pixels" in processor:
        processor["max_pixels"] = 448**2
        processor["min_pixels"] = min(processor["min_pixels"], 448**2 // 2)
    if processor and "max_image_size" in processor:
        processor["max_image_size"]["longest_edge"] = config["vision_config"]["image_size"]
    if processor and preset not in SIZES and "longest_edge" in processor.get("size", {}):
        processor["size"]["longest_edge"] = LONGEST.get(preset, 448**2)
    if processor and "min_num_patches" in processor:
        processor |= {"min_num_patches": 64, "max_num_patches": 256}
    if both := files.get("processor_config.json"):
        both["image_processor"]["max_image_tokens"] = 256
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder
