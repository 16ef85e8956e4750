"""From messages to tokens: the chat template, and a placeholder for each row of an embedding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import TemplateError

from actors.errors import InvalidRequest
from encoder_service.llm.spec import LlmSpec
from encoder_service.llm.tokenizer import Language
from encoder_service.llm.types import Message


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model reads."""

    ids: list[int]
    """The image token stands as often as the image's embedding has rows."""
    max_tokens: int
    """How many more the answer may have."""


def prompt(
    messages: Sequence[Message],
    image_tokens: Sequence[int],
    max_tokens: int,
    spec: LlmSpec,
    language: Language,
) -> Prompt:
    """`image_tokens`: rows of each image's embedding. Raises InvalidRequest."""
    try:
        ids = language.tokenizer.apply_chat_template(
            list(messages),
            chat_template=language.template,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise InvalidRequest(f"the model's chat template refuses the messages: {error}") from error
    expanded = expand(ids, image_tokens, spec.image_token_id)
    room = spec.max_model_len - len(expanded)
    if room <= 0:
        raise InvalidRequest(
            f"the messages are {len(expanded)} tokens, {sum(image_tokens)} of them of images; the "
            f"maximum context length is {spec.max_model_len} (llm.max_model_len): send less"
        )
    return Prompt(expanded, min(max_tokens, room))


def expand(ids: Sequence[int], image_tokens: Sequence[int], image_token_id: int) -> list[int]:
    """Each image token as often as its image has rows. Raises InvalidRequest."""
    if ids.count(image_token_id) != len(image_tokens):
        raise InvalidRequest(
            f"the messages have {len(image_tokens)} images but {ids.count(image_token_id)} image "
            "tokens: a text must not hold the model's own tokens"
        )
    counts = iter(image_tokens)
    expanded: list[int] = []
    for token in ids:
        expanded += [token] * (next(counts) if token == image_token_id else 1)
    return expanded
