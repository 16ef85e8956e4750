"""From messages to tokens: the chat template, and a placeholder for each row of an embedding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jinja2 import TemplateError

from actors.errors import InvalidRequest
from encoder_service.llm.placeholders import Placed
from encoder_service.llm.spec import LlmSpec
from encoder_service.llm.tokenizer import Language
from encoder_service.llm.types import Message

TEXT, IMAGE, VIDEO = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model reads."""

    ids: list[int]
    """A token stands for each row of the embeddings."""
    kinds: list[int]
    """What each token stands for: TEXT, or a row of IMAGE or VIDEO (transformers:
    mm_token_type_ids)."""
    placed: tuple[Placed, ...]
    """The images and videos, in order."""
    max_tokens: int
    """How many more the answer may have."""


def prompt(
    messages: Sequence[Message],
    placed: Sequence[Placed],
    max_tokens: int,
    spec: LlmSpec,
    language: Language,
) -> Prompt:
    """`placed`: the images and videos of the messages. Raises InvalidRequest."""
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
    expanded, kinds = expand(ids, placed, spec, language)
    room = spec.max_model_len - len(expanded)
    if room <= 0:
        raise InvalidRequest(
            f"the messages are {len(expanded)} tokens, {sum(one.tokens for one in placed)} of "
            "them of images and videos; the maximum context length is "
            f"{spec.max_model_len} (llm.max_model_len): send less"
        )
    return Prompt(expanded, kinds, tuple(placed), min(max_tokens, room))


def expand(
    ids: Sequence[int], placed: Sequence[Placed], spec: LlmSpec, language: Language
) -> tuple[list[int], list[int]]:
    """Each image's and each video's token -> what stands for its rows; and the kinds of all.

    Raises InvalidRequest where there are not as many such tokens as images and videos.
    """
    tokens = {spec.image_token_id: "image", spec.video_token_id: "video"}
    waiting: dict[str, Iterator[Placed]] = {}
    for token, kind in tokens.items():
        ones = [one for one in placed if one.kind == kind]
        if ids.count(token) != len(ones):
            raise InvalidRequest(
                f"the messages have {len(ones)} {kind}s but {ids.count(token)} {kind} tokens: "
                "a text must not hold the model's own tokens"
            )
        waiting[kind] = iter(ones)
    expanded: list[int] = []
    kinds: list[int] = []
    for token in ids:
        runs = [([token], TEXT)]
        if token in tokens:
            one = next(waiting[tokens[token]])
            runs = image_runs(one, spec) if one.kind == "image" else video_runs(one, spec, language)
        for run, kind_id in runs:
            expanded += run
            kinds += [kind_id] * len(run)
    return expanded, kinds


Runs = list[tuple[list[int], int]]
"""Tokens, and the kind of all of them."""


def image_runs(one: Placed, spec: LlmSpec) -> Runs:
    """The image token as often as the image has rows."""
    return [([spec.image_token_id] * one.tokens, IMAGE)]


def video_runs(one: Placed, spec: LlmSpec, language: Language) -> Runs:
    """The groups of a video's frames with the text around each."""
    style = spec.video_style
    token = spec.image_token_id if style.as_images else spec.video_token_id
    rows = [token] * (one.tokens // len(one.times))
    runs: Runs = []
    for texts in one.texts(style):
        before, after = (
            language.tokenizer.encode(text, add_special_tokens=False) for text in texts
        )
        runs += [(before, TEXT), (rows, VIDEO), (after, TEXT)]
    return runs
