"""Turns messages into tokens: tokenizer, chat template, a placeholder for each embedding row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from actors.errors import CheckpointError, InvalidRequest, UnsupportedMedia
from actors.media.text import read_tokenizer
from actors.options import ModelOptions
from actors.spec.checkpoint import Files, Preset, find
from actors.spec.video import VideoSizing, retained_tokens
from actors.types import Grid, Kind, Media
from encoder_service.llm.calls import Message
from encoder_service.llm.spec import LlmSpec
from encoder_service.wire.formats import Document

TEXT, IMAGE, VIDEO = 0, 1, 2

SPECIAL = ["im_start", "im_end", "image_pad", "video_pad", "vision_start", "vision_end"]
"""A preset's special tokens, which follow its 256 byte tokens."""

CHATML = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>\
{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>\
{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Qwen's chat template, for presets."""


def load_tokenizer(options: ModelOptions) -> Any:
    """Loads a model's PreTrainedTokenizerFast and chat template. A preset gets bytes and ChatML.

    Raises CheckpointError.
    """
    files = find(options)
    if isinstance(files, Preset):
        return byte_tokenizer()
    tokenizer = read_tokenizer(options.id, options.revision)
    tokenizer.chat_template = read_template(files) or tokenizer.chat_template
    if not isinstance(tokenizer.chat_template, str) or not tokenizer.is_fast:
        raise CheckpointError(
            f"{options.id!r} has no tokenizer.json or no chat template: chat needs both"
        )
    return tokenizer


def read_template(files: Files) -> str | None:
    """Reads the processor's template, because the tokenizer's may not support images."""
    path = files.path("chat_template.jinja")
    if path is not None:
        return path.read_text(encoding="utf-8")
    stored = files.read_json("chat_template.json") or {}
    return stored.get("chat_template")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte plus those of ChatML, for presets, which have no vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={sign: i for i, sign in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([f"<|{name}|>" for name in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=CHATML
    )


@dataclass(frozen=True, slots=True)
class Placed:
    """An image or a video of a prompt. Its placeholders are those of its family's own processor.

    An image has one token per embedding row. A video has as many per group of frames as the group
    has rows; in some families, texts with the group's time surround them.
    """

    kind: Kind
    grid_thw: Grid
    tokens: int
    times: tuple[float, ...] = ()
    """The time of each group of a video's frames, in seconds."""
    seconds_per_group: float = 0.0
    dropped: int = 0
    """Rows that Efficient Video Sampling will drop. Their tokens are dropped too (model.pruned)."""


def place(media: Media, video: VideoSizing | None) -> Placed:
    """`video`: how the encoders divide videos. Raises UnsupportedMedia for a video without it."""
    plan, clip = media.plan, media.clip
    if clip is None:
        return Placed("image", plan.grid_thw, plan.tokens)
    if video is None:
        raise UnsupportedMedia("this model takes no videos: send frames as images")
    video = video.asked(media.kwargs)
    times, seconds = tuple(video.timestamps(clip)), video.seconds_per_group(clip)
    dropped = plan.tokens - retained_tokens(plan, media.evs_rate)
    return Placed("video", plan.grid_thw, plan.tokens, times, seconds, dropped)


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: list[int]
    """One token for each embedding row, including rows that will be dropped."""
    kinds: list[int]
    """The kind of each token (mm_token_type_ids): TEXT, or IMAGE or VIDEO for an embedding row."""
    placed: tuple[Placed, ...]
    max_tokens: int


def prompt(
    messages: Sequence[Message],
    placed: Sequence[Placed],
    max_tokens: int,
    spec: LlmSpec,
    tokenizer: Any,
    tools: Sequence[Document] = (),
) -> Prompt:
    """Applies the chat template and expands placeholders. Raises InvalidRequest."""
    try:
        ids = tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) or None,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise InvalidRequest(f"the model's chat template refuses the messages: {error}") from error
    expanded, kinds = expand(ids, placed, spec, tokenizer)
    seen, dropped = (sum(getattr(one, name) for one in placed) for name in ("tokens", "dropped"))
    length = len(expanded) - dropped
    room = spec.max_model_len - length
    if room <= 0:
        raise InvalidRequest(
            f"the messages are {length} tokens, {seen - dropped} of "
            "them of images and videos; the maximum context length is "
            f"{spec.max_model_len} (llm.max_model_len): send less"
        )
    return Prompt(expanded, kinds, tuple(placed), min(max_tokens, room))


def expand(
    ids: Sequence[int], placed: Sequence[Placed], spec: LlmSpec, tokenizer: Any
) -> tuple[list[int], list[int]]:
    """Replaces the token of each image and video by its placeholders. Returns ids and kinds.

    Raises InvalidRequest if there are not as many such tokens as images and videos.
    """
    tokens = {spec.image_token_id: "image", spec.video_token_id: "video"}
    waiting: dict[str, Iterator[Placed]] = {}
    for token, kind in tokens.items():
        ones = [one for one in placed if one.kind == kind]
        if ids.count(token) != len(ones):
            raise InvalidRequest(
                f"the messages have {len(ones)} {kind}s but {ids.count(token)} {kind} tokens: "
                "a text must not contain the model's own tokens"
            )
        waiting[kind] = iter(ones)
    expanded: list[int] = []
    kinds: list[int] = []
    for token in ids:
        runs = [([token], TEXT)]
        if token in tokens:
            one = next(waiting[tokens[token]])
            if one.kind == "image":
                runs = [([spec.image_token_id] * one.tokens, IMAGE)]
            else:
                runs = video_runs(one, spec, tokenizer)
        for run, kind_id in runs:
            expanded += run
            kinds += [kind_id] * len(run)
    return expanded, kinds


def video_runs(one: Placed, spec: LlmSpec, tokenizer: Any) -> list[tuple[list[int], int]]:
    """The tokens of a video, as runs of one kind each."""
    style = spec.video_style
    token = spec.image_token_id if style.as_images else spec.video_token_id
    rows = [token] * (one.tokens // len(one.times))
    runs = []
    for time in one.times:
        before, after = (
            tokenizer.encode(text.format(seconds=time, whole=int(time)), add_special_tokens=False)
            for text in (style.before, style.after)
        )
        runs += [(before, TEXT), (rows, VIDEO), (after, TEXT)]
    return runs
