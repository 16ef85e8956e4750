"""A small random model that an engine can serve: with a tokenizer, and sizes for its kernels."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from encoder_service.llm.prompt import CHATML
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


def write(folder: Path, family: str) -> None:
    """A whole checkpoint of PROCESSORS' families, in float32."""
    made = CHECKPOINTS[family]
    width = "hidden_size" if family == "qwen2_vl" else "out_hidden_size"
    vision = dict(made.vision) | {width: HIDDEN}
    write_made(folder, replace(made, vision=vision, text=dict(made.text) | TEXT), "1GB")
    byte_tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    processor, videos = PROCESSORS[family]
    images = "Qwen2VLImageProcessor"
    file = folder / "preprocessor_config.json"
    settings: dict[str, Any] = json.loads(file.read_text()) | {"processor_class": processor}
    file.write_text(json.dumps(settings | {"image_processor_type": images}))
    file = folder / "video_preprocessor_config.json"
    file.write_text(json.dumps(settings | {"video_processor_type": videos}))


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, then unused ones up to the special ones."""
    first = TOKENS["image_token_id"]
    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    signs += [f"<|unused {i}|>" for i in range(len(signs), first)]
    vocabulary = {sign: i for i, sign in enumerate(signs)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
