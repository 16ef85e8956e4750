"""What goes to a language model, a ChatCall, and what comes back: Pieces, then a Finish or
ChatFailed. Also the parameters of a request that the model reads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from actors.errors import ServiceError
from actors.telemetry.tracing import NOBODY, Origin
from actors.types import Media
from encoder_service.wire.formats import Document

MOST_STOPS = 16
MOST_STOP_CHARACTERS = 1000
"""Maximum length of a stop text, because the end of the text is compared with each prefix: up to
5 ms per token with 16 such texts."""
MOST_CHOICES, MOST_LOGPROBS = 128, 20  # OpenAI's limits
MOST_STOP_TOKENS, MOST_BIASED = 100, 1024
"""vLLM ends if a request exceeds its own limits, which are 128 and 1024. It also counts the stop
tokens of the checkpoint."""
MOST_REPEATS = 1000
"""Maximum sum of the counts, such as {1,20}, in the patterns of JSON schemas: vLLM compiles one in
a time that grows with its square, 0.3 s for 1,000, and answers nobody meanwhile."""
REPEAT = re.compile(r"\{\s*(\d+)\s*(?:,\s*(\d+)?\s*)?\}")

Message = dict[str, Any]
"""{"role", "content"} as chat templates read it, and "tool_calls" or "tool_call_id" if given.

Images and videos in the content are {"type": "image"} and {"type": "video"}.
"""


class StrictModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def without_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None}


def as_tuple(stop: Any) -> Any:
    if isinstance(stop, list):
        return tuple(stop)
    return (stop,) if isinstance(stop, str) else stop


class SamplingParams(StrictModel):
    """How the next token is chosen, and when generation stops."""

    max_tokens: int | None = Field(None, gt=0)
    """None: the service's default."""
    temperature: float | None = Field(None, ge=0, le=2)
    """0: greedy. None: as in the checkpoint's generation_config.json."""
    top_p: float | None = Field(None, gt=0, le=1)
    """None: as in the checkpoint's generation_config.json."""
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=MOST_STOP_CHARACTERS)], ...],
        Field(max_length=MOST_STOPS),
        BeforeValidator(as_tuple, json_schema_input_type=str | list[str] | None),
    ] = ()
    """Texts that end the completion and are not part of it."""


class JsonSchema(StrictModel):
    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool = True

    @model_validator(mode="after")
    def few_counted_repeats(self) -> Self:
        check_repeats(self.schema_)
        return self


def check_repeats(*schemas: Any) -> None:
    counts = (count for pattern in patterns(*schemas) for count in REPEAT.findall(pattern))
    if sum(max(map(float, filter(None, count))) for count in counts) > MOST_REPEATS:
        raise ValueError(
            "the counts in its patterns, such as {1,20}, add up to more than "
            f"{MOST_REPEATS}: use minLength and maxLength, + or *"
        )


def patterns(*schemas: Any) -> Iterator[str]:
    """The regular expressions of JSON schemas."""
    left = [*schemas]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            named = part.get("patternProperties")
            yield from named if isinstance(named, dict) else ()
            if isinstance(pattern := part.get("pattern"), str):
                yield pattern
            left.extend(part.values())
        elif isinstance(part, list):
            left.extend(part)


class TextFormat(StrictModel):
    type: Literal["text"]


class JsonFormat(StrictModel):
    type: Literal["json_object"]


class SchemaFormat(StrictModel):
    type: Literal["json_schema"]
    json_schema: JsonSchema


def as_whole(number: Any) -> Any:
    """1 for 1.0, which JSON does not distinguish."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


TokenId = Annotated[int, Field(ge=0, strict=False)]
"""Strings are accepted too, because keys of a JSON object are strings."""


class VllmParams(SamplingParams):
    """Adds what vLLM supports. None: as in generation_config.json, or else vLLM's default."""

    n: Annotated[int, BeforeValidator(as_whole)] = Field(1, ge=1, le=MOST_CHOICES)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=2)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    """Tokens to choose from; 0 or -1: all."""
    min_p: float | None = Field(None, ge=0, le=1)
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False
    stop_token_ids: list[TokenId] = Field([], max_length=MOST_STOP_TOKENS)
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100, le=100)]] = Field(
        {}, max_length=MOST_BIASED
    )
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MOST_LOGPROBS)
    response_format: Annotated[
        TextFormat | JsonFormat | SchemaFormat | None, Field(discriminator="type")
    ] = None

    @model_validator(mode="after")
    def top_logprobs_need_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs: true")
        return self

    @model_validator(mode="after")
    def seeds_have_64_bits(self) -> Self:
        """vLLM seeds each completion with the next number. Its engine dies of a larger one."""
        if self.seed is not None and self.seed + self.n > 2**63:
            raise ValueError("seed: at most 2**63 - n; lower it")
        return self


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, and which of them the model may or must call."""

    tools: tuple[Document, ...]
    """In OpenAI's form, which chat templates and vLLM read."""
    choice: str | Document
    """`auto`, `required`, or the function to call, in OpenAI's form."""
    parallel: bool
    """False: at most one call."""


@dataclass(frozen=True, slots=True)
class ChatCall:
    """An admitted request."""

    messages: tuple[Message, ...]
    media: tuple[Media, ...]
    """Images and videos, in the order of the messages."""
    sampling: SamplingParams
    timeout_seconds: float
    origin: Origin = NOBODY
    stream: bool = True
    """False: no piece is sent before the completion has ended."""
    counted: bool = False
    """Whether pieces have their `usage`. Then tokens without text are pieces, too."""
    tool_use: ToolUse | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """The next part of a completion's text."""

    text: str
    index: int = 0
    """Which of the `n` completions."""
    logprobs: tuple[Document, ...] = ()
    """Those of its tokens, in OpenAI's form, if the request asks for them."""
    usage: tuple[int, int] | None = None
    """Tokens of the prompt and of the completion so far, if the request asks for them."""
    tool_calls: tuple[Document, ...] = ()
    """The next parts of tool calls, as in OpenAI's streams; whole calls if not streamed."""


Reason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Finish:
    reasons: tuple[Reason, ...]
    """Why each of the `n` completions has ended."""
    prompt_tokens: int
    """Includes the tokens of images and videos."""
    completion_tokens: int
    """Total over all completions."""

    @property
    def usage(self) -> tuple[int, int]:
        return self.prompt_tokens, self.completion_tokens


@dataclass(frozen=True, slots=True)
class ChatFailed:
    """The last event of a failed request. It is not an exception, because Serve logs exceptions."""

    error: ServiceError
    item: int | None = None
    """Position of the image or video at fault; None: the request as a whole."""


ChatEvent = Piece | Finish
