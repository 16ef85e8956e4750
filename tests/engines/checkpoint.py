"""A small random model that an engine can serve: with a tokenizer, and sizes for its kernels."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from encoder_service.llm.prompt import CHATML
from tests import checkpoints_clip, checkpoints_tiles
from tests.checkpoints import CHECKPOINTS, TOKENS, write_made

HIDDEN = 128
TEXT = {
    "hidden_size": HIDDEN,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,  # far from 0, so that what stands in the prompt shows in the logits
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 5, 5]},
}
"""vLLM's attention on the CPU has no heads of 24 values."""
SPECIAL = (
    "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>",
    "<|im_start|>", "<|im_end|>",
)  # fmt: skip
"""In the order of TOKENS, from its first number on."""
TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}""" + CHATML.replace(
    "<|im_end|>",
    "{% for call in message.tool_calls or [] %}"
    "{{ call.id }}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
    "{{ message.tool_call_id }}<|im_end|>",
)
"""With tools."""
PROCESSORS = {  # not Qwen3.5: vLLM runs it in bfloat16 alone here, which hides what images change
    "qwen2_vl": ("Qwen2VLProcessor", "Qwen2VLVideoProcessor"),
    "qwen2_5_vl": ("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor"),
    "qwen3_vl": ("Qwen3VLProcessor", "Qwen3VLVideoProcessor"),
}
MARKS = {
    "start_image_token": SPECIAL[2],
    "end_image_token": SPECIAL[3],
    "context_image_token": SPECIAL[0],
    "video_token": SPECIAL[1],
}
"""Of a tokenizer, for InternVL's processor."""
WITHOUT_GRIDS: dict[str, tuple[Callable[[Path], Any], str, str, dict[str, Any]]] = {
    "internvl": (
        lambda folder: checkpoints_tiles.write_internvl(folder, "300M"),
        "InternVLProcessor",
        "GotOcr2ImageProcessor",
        {"image_seq_length": 9},
    ),
    "llava": (
        lambda folder: checkpoints_clip.write_llava(folder, "clip"),
        "LlavaProcessor",
        "CLIPImageProcessor",
        {"num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"},
    ),
    "llava_next": (
        lambda folder: checkpoints_clip.write_llava_next(folder, "clip"),
        "LlavaNextProcessor",
        "LlavaNextImageProcessor",
        {"num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"},
    ),
    "llava_onevision": (
        checkpoints_clip.write_onevision,
        "LlavaOnevisionProcessor",
        "LlavaOnevisionImageProcessor",
        {"num_image_tokens": 36, "vision_feature_select_strategy": "full"},
    ),
}
"""What writes a model of a family whose images vLLM takes as rows alone, and its processor: class,
image processor, settings."""
CLIP_NAMES = ("vision_tower.", "vision_tower.vision_model.")
"""The towers' tensors, as this transformers writes them and as they are published."""


def write_without_grids(folder: Path, family: str) -> None:
    """A whole checkpoint of WITHOUT_GRIDS' families, in float32."""
    made, processor, images, settings = WITHOUT_GRIDS[family]
    sizes = {key: TEXT[key] for key in ("hidden_size", "head_dim", "initializer_range")}
    aspect = "anyres_max_9"  # vLLM knows no other
    with (
        patch.dict(checkpoints_tiles.TEXT, sizes, vocab_size=2048),
        patch.object(checkpoints_clip, "ASPECT", aspect),
    ):
        made(folder)
    file = folder / "config.json"
    config: dict[str, Any] = json.loads(file.read_text())
    for key in config:
        if (name := key.replace("_token_index", "_token_id")) in TOKENS:
            config[key] = TOKENS[name]
    file.write_text(json.dumps(config))
    tensors: dict[str, Any] = {}
    for shard in folder.glob("*.safetensors"):
        tensors |= load_file(shard)
        shard.unlink()
    (folder / "model.safetensors.index.json").unlink()
    if family != "internvl":
        tensors = {name.replace(*CLIP_NAMES, 1): one for name, one in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    byte_tokenizer(extra_special_tokens=MARKS).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(CHATML)
    kind: dict[str, Any] = {"processor_class": processor}
    file = folder / "preprocessor_config.json"
    read: dict[str, Any] = json.loads(file.read_text()) | kind
    file.write_text(json.dumps(read | {"image_processor_type": images}))
    videos = read | {"video_processor_type": processor.replace("Processor", "VideoProcessor")}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(videos))
    kind |= settings | {"image_token": SPECIAL[0], "video_token": SPECIAL[1], "patch_size": 14}
    kind |= {"vision_aspect_ratio": aspect} if "onevision" in family else {}
    (folder / "processor_config.json").write_text(json.dumps(kind))


def write(
    folder: Path,
    family: str,
    vision: Mapping[str, Any] = MappingProxyType({}),
    text: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """A whole checkpoint of PROCESSORS' families, in float32, with these sizes in place of small
    ones."""
    made = CHECKPOINTS[family]
    width = "hidden_size" if family == "qwen2_vl" else "out_hidden_size"
    texts = {**made.text, **TEXT, **text}
    visions = {**made.vision, **vision, width: texts["hidden_size"]}
    write_made(folder, replace(made, vision=visions, text=texts), "4GB")
    byte_tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    processor, videos = PROCESSORS[family]
    images = "Qwen2VLImageProcessor"
    file = folder / "preprocessor_config.json"
    settings: dict[str, Any] = json.loads(file.read_text()) | {"processor_class": processor}
    file.write_text(json.dumps(settings | {"image_processor_type": images}))
    file = folder / "video_preprocessor_config.json"
    file.write_text(json.dumps(settings | {"video_processor_type": videos}))


def byte_tokenizer(**settings: Any) -> PreTrainedTokenizerFast:
    """A token for each byte, then unused ones up to the special ones."""
    first = TOKENS["image_token_id"]
    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    signs += [f"<|unused {i}|>" for i in range(len(signs), first)]
    vocabulary = {sign: i for i, sign in enumerate(signs)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", **settings)
