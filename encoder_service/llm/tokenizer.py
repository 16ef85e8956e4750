"""The tokenizer and the chat template of a model: its own, or bytes and ChatML for a preset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from actors.errors import CheckpointError
from actors.options import ModelOptions
from actors.spec.checkpoint import Files, Preset, find

SPECIAL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
)
"""Of a preset, after the 256 bytes."""

CHATML = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>\
{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>\
{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Qwen's format, for presets."""


@dataclass(frozen=True, slots=True)
class Language:
    """What turns messages into tokens and tokens into text."""

    tokenizer: Any
    """transformers' PreTrainedTokenizerFast."""
    template: str


def load(options: ModelOptions) -> Language:
    """Raises CheckpointError. Code from a repository is never run."""
    files = find(options)
    if isinstance(files, Preset):
        return Language(byte_tokenizer(), CHATML)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            options.id, revision=options.revision, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the tokenizer of {options.id!r} cannot be read: {error}") from error
    template = read_template(files) or tokenizer.chat_template
    if not isinstance(template, str) or not tokenizer.is_fast:
        raise CheckpointError(
            f"{options.id!r} has no tokenizer.json or no chat template: a model for chat has both"
        )
    return Language(tokenizer, template)


def read_template(files: Files) -> str | None:
    """The processor's template, which knows of images where the tokenizer's may not."""
    path = files.path("chat_template.jinja")
    if path is not None:
        return path.read_text(encoding="utf-8")
    stored = files.read_json("chat_template.json") or {}
    return stored.get("chat_template")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, and those of ChatML: no preset has a vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={sign: i for i, sign in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
