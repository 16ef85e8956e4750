"""OpenAI's chat request. What is admitted of it becomes a ChatCall (llm/calls.py).

Unknown keys are rejected, and null is the same as an absent key. A parameter that the language
model does not support is accepted only with values that change nothing. VllmRequest has the
parameters that vLLM supports.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Tag,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from actors.errors import InvalidRequest, NotFound
from actors.types import Kind
from encoder_service.api.schema import KwargsFields
from encoder_service.config import LlmEngine
from encoder_service.llm.calls import (
    Message,
    SamplingParams,
    StrictModel,
    ToolUse,
    VllmParams,
    check_repeats,
)
from encoder_service.wire.documents import FRAMES, RequestItem, is_data_url, split_data_url
from encoder_service.wire.formats import Document, WireError, from_base64, read_json

MOST_TURNS, MOST_PARTS = 4096, 1024
"""Maximum messages per request and parts per message, because even empty ones take time."""
MOST_TOOLS = 128
"""Maximum tools of a request, and calls of a message; OpenAI's limit for tools."""
MOST_LEVELS = 48
"""Maximum depth of a tool's parameters: vLLM takes 64 levels, of which up to 15 are its own."""
MOST_PROBLEMS, MOST_NAMED, MOST_KEY = 1000, 10, 100
"""Limits of an error message: problems examined, problems named, characters of a key."""
MESSAGE_PART = 5
"""Keys in pydantic's location of a message part: messages, i, content, j, and its type."""
LOW_PIXELS = 512 * 512
"""Maximum pixels of an image with `detail: low`, as in OpenAI's API."""
MOST_SHOWN = 40
"""Maximum characters quoted of an invalid URL, which may be a whole file in base64."""
EXAMPLES: dict[Kind, str] = {"image": "image/jpeg", "video": "video/mp4"}
KINDS: dict[str, Kind] = {"image_url": "image", "video_url": "video"}
"""Maps the `type` of a part to that of an item."""


class TextPart(StrictModel):
    type: Literal["text"]
    text: str


class ImageUrl(StrictModel):
    """`data:image/jpeg;base64,...`, or an https URL whose host `fetch.allow_hosts` names."""

    url: str
    detail: Literal["auto", "low", "high"] = "auto"
    """`low`: at most LOW_PIXELS. `high`: as many as the checkpoint takes. `auto`: as configured."""


class ImagePart(StrictModel):
    type: Literal["image_url"]
    image_url: ImageUrl


class VideoUrl(StrictModel):
    """`data:video/mp4;base64,...`, or an https URL whose host `fetch.allow_hosts` names.

    `data:video/jpeg;base64,` is followed by frames, as JPEGs in base64 separated by commas. All of
    them are encoded.
    """

    url: str


class VideoPart(StrictModel):
    type: Literal["video_url"]
    video_url: VideoUrl


class Only:
    """Annotates a parameter for which only `accepted` values, which change nothing, are allowed."""

    def __init__(self, *accepted: Any) -> None:
        self.accepted = accepted

    def check(self, value: Any) -> Any:
        """Returns the accepted value, which may be of another type: 1 for 1.0."""
        for one in self.accepted:
            if one == value:
                return one
        shown = " or ".join(map(json.dumps, self.accepted))
        raise ValueError(f"only {shown} is supported here")

    def __get_pydantic_core_schema__(self, kind: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(kind))

    def __get_pydantic_json_schema__(
        self, kind: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"enum": [*self.accepted, None]}


def as_parts(content: Any, info: ValidationInfo) -> Any:
    """Only what an assistant said may be missing. It becomes an empty text, because chat templates
    read none from null."""
    if content is None:
        if info.data.get("role") != "assistant":
            raise PydanticKnownError("missing")
        content = ""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def not_called(tools: list[Any] | None, info: ValidationInfo) -> list[Any] | None:
    if tools and info.data.get("tool_choice") != "none":
        raise ValueError('only with llm.engine: vllm, or with tool_choice "none"')
    return tools


def callable_tools(tools: Any, info: ValidationInfo) -> Any:
    """With tool_choice none, any tools are accepted and dropped."""
    unused = isinstance(tools, list) and info.data.get("tool_choice") == "none"
    return [] if unused else tools


def few_levels(value: Any) -> Any:
    levels, level = 0, [value]
    while level := [part for part in level if isinstance(part, dict | list)]:
        levels += 1
        level = [each for one in level for each in (one.values() if isinstance(one, dict) else one)]
    if levels > MOST_LEVELS:
        raise ValueError(f"{levels} objects and lists inside each other; at most {MOST_LEVELS}")
    return value


class Function(StrictModel):
    name: str = Field(pattern="^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, AfterValidator(few_levels)] = None
    """A JSON schema."""
    strict: bool | None = None
    """Whether the arguments follow the schema, also with tool_choice auto."""


class Tool(StrictModel):
    type: Literal["function"]
    function: Function

    def for_template(self) -> Document:
        """As vLLM shows tools to chat templates: with null, but without an absent `strict`."""
        given = self.function
        shown: Document = {"name": given.name, "description": given.description}
        shown["parameters"] = given.parameters
        if given.strict is not None:
            shown["strict"] = given.strict
        return {"type": self.type, "function": shown}


class NamedFunction(StrictModel):
    name: str


class NamedTool(StrictModel):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("text")]
    | Annotated[NamedTool, Tag("function")],
    Discriminator(lambda choice: "text" if isinstance(choice, str) else "function"),
]


def few_patterns(tools: list[Tool]) -> list[Tool]:
    check_repeats(*(tool.function.parameters for tool in tools))
    return tools


def as_arguments(arguments: Any) -> Any:
    """Chat templates read an object. What a model has said wrongly is an empty one, as in vLLM."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return read_json(arguments.encode("utf-8", "replace"))
    except WireError:
        return {}


class CalledFunction(StrictModel):
    name: str
    arguments: Annotated[
        dict[str, Any],
        BeforeValidator(as_arguments, json_schema_input_type=str | dict[str, Any]),
        AfterValidator(few_levels),
    ] = Field({})


class ToolCall(StrictModel):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """Ignored: clients that put streamed calls together keep it."""

    def for_template(self) -> Document:
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": self.type, "function": function}


ContentPart = Annotated[TextPart | ImagePart | VideoPart, Field(discriminator="type")]


def json_characters(given: Sequence[Tool | ToolCall]) -> int:
    return sum(len(json.dumps(one.for_template(), ensure_ascii=False)) for one in given)


class ChatMessage(StrictModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        list[ContentPart],
        BeforeValidator(as_parts, json_schema_input_type=str | list[ContentPart] | None),
    ] = Field(None, min_length=1, max_length=MOST_PARTS, fail_fast=True, validate_default=True)
    name: str | None = None
    """Ignored, because chat templates do not read it."""
    tool_calls: list[ToolCall] = Field([], max_length=MOST_TOOLS, fail_fast=True)
    """Those of an assistant."""
    tool_call_id: str | None = None
    """The call whose result a tool's message is."""
    annotations: Annotated[Any, Only([])] = None
    """Empty in completions that clients send back."""

    @model_validator(mode="after")
    def roles_have_their_keys(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls: only of the role assistant")
        if self.tool_call_id is not None and self.role != "tool":
            raise ValueError("tool_call_id: only of the role tool")
        return self

    def for_template(self) -> Message:
        """Text-only content becomes a string, which every chat template accepts."""
        message: Message = {"role": "system" if self.role == "developer" else self.role}
        if self.tool_calls:
            message["tool_calls"] = [one.for_template() for one in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        texts = [part.text for part in self.content if isinstance(part, TextPart)]
        if len(texts) == len(self.content):
            between = "\n" if self.role == "tool" else ""  # as vLLM
            return message | {"content": between.join(texts)}
        content = [
            {"type": "text", "text": part.text}
            if isinstance(part, TextPart)
            else {"type": KINDS[part.type]}
            for part in self.content
        ]
        return message | {"content": content}

    def characters(self) -> int:
        texts = sum(len(part.text) for part in self.content if isinstance(part, TextPart))
        return texts + len(self.tool_call_id or "") + json_characters(self.tool_calls)


class SizeRange(StrictModel):
    """transformers' `size`: range of the pixels of an image, or of all its frames together
    (GLM-V)."""

    shortest_edge: int | None = Field(None, gt=0)
    longest_edge: int | None = Field(None, gt=0)


class ChatKwargs(KwargsFields, StrictModel):
    """vLLM's `mm_processor_kwargs`. They apply to all images and videos whose kind takes them."""

    size: SizeRange | None = None
    do_sample_frames: Literal[True] = True
    """Accepted because clients of vLLM send it: frames of a video file are always sampled."""


class StreamOptions(StrictModel):
    include_usage: bool = False
    include_obfuscation: bool = False
    """Ignored: events are not padded."""


class VllmStreamOptions(StreamOptions):
    continuous_usage_stats: bool = False
    """With include_usage: events with text have a `usage`, and tokens without text are events."""


class ChatRequest(SamplingParams):
    """The body of POST /v1/chat/completions."""

    params: ClassVar[type[SamplingParams]] = SamplingParams

    model: str
    # fail_fast: listing a million wrong messages would take seconds.
    messages: list[ChatMessage] = Field(min_length=1, max_length=MOST_TURNS, fail_fast=True)
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_completion_tokens: int | None = Field(None, gt=0)
    """The newer name of max_tokens."""
    mm_processor_kwargs: ChatKwargs = ChatKwargs()
    n: Annotated[Any, Only(1)] = None
    frequency_penalty: Annotated[Any, Only(0)] = None
    presence_penalty: Annotated[Any, Only(0)] = None
    logit_bias: Annotated[Any, Only({})] = None
    logprobs: Annotated[Any, Only(False)] = None
    top_logprobs: Annotated[Any, Only(0)] = None
    response_format: Annotated[Any, Only({"type": "text"})] = None
    modalities: Annotated[Any, Only(["text"])] = None
    tool_choice: Annotated[Any, Only("none", "auto")] = None
    tools: Annotated[list[Any] | None, AfterValidator(not_called)] = None
    """It follows tool_choice, which not_called and callable_tools read."""
    functions: Annotated[Any, Only([])] = None
    function_call: Annotated[Any, Only("none", "auto")] = None
    service_tier: Annotated[Any, Only("auto", "default")] = None
    store: Annotated[Any, Only(False)] = None
    verbosity: Annotated[Any, Only("medium")] = None
    # vLLM's, with its defaults:
    echo: Annotated[Any, Only(False)] = None
    add_generation_prompt: Annotated[Any, Only(True)] = None
    add_special_tokens: Annotated[Any, Only(False)] = None
    use_beam_search: Annotated[Any, Only(False)] = None
    length_penalty: Annotated[Any, Only(1)] = None
    include_stop_str_in_output: Annotated[Any, Only(False)] = None
    skip_special_tokens: Annotated[Any, Only(True)] = None
    spaces_between_special_tokens: Annotated[Any, Only(True)] = None
    parallel_tool_calls: bool | None = None
    """This and the following parameters have no effect, whatever their values."""
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    metadata: dict[str, str] | None = None

    @model_validator(mode="after")
    def options_belong_to_a_stream(self) -> Self:
        if self.stream_options and not self.stream:
            raise ValueError("stream_options: only with stream: true")
        return self

    @property
    def counted(self) -> bool:
        """Whether events with text have a `usage`."""
        return False

    def sampling(self) -> SamplingParams:
        chosen = {name: getattr(self, name) for name in self.params.model_fields}
        chosen["max_tokens"] = self.max_completion_tokens or self.max_tokens
        return self.params(**chosen)

    def tool_use(self) -> ToolUse | None:
        return None

    def characters(self) -> int:
        return sum(message.characters() for message in self.messages)

    def media(self) -> Iterator[tuple[str, ImagePart | VideoPart]]:
        """The path and part of each image and video, in order."""
        for i, message in enumerate(self.messages):
            for j, part in enumerate(message.content):
                if not isinstance(part, TextPart):
                    yield f"messages[{i}].content[{j}].{part.type}", part


class VllmRequest(VllmParams, ChatRequest):
    """The body of POST /v1/chat/completions, with `llm.engine: vllm`."""

    params: ClassVar[type[SamplingParams]] = VllmParams
    stream_options: VllmStreamOptions | None = None
    tool_choice: ToolChoice | None = None
    tools: Annotated[
        list[Tool],
        BeforeValidator(callable_tools, json_schema_input_type=list[Tool] | None),
        AfterValidator(few_patterns),
    ] = Field([], max_length=MOST_TOOLS)
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def choice_is_among_the_tools(self) -> Self:
        choice, names = self.tool_choice, [tool.function.name for tool in self.tools]
        if choice == "required" and not names:
            raise ValueError("tool_choice: required needs tools")
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise ValueError("tool_choice: none of the tools has this name")
        return self

    def tool_use(self) -> ToolUse | None:
        if not self.tools:
            return None
        choice = self.tool_choice or "auto"
        return ToolUse(
            tuple(tool.for_template() for tool in self.tools),
            choice if isinstance(choice, str) else choice.model_dump(),
            self.parallel_tool_calls,
        )

    def characters(self) -> int:
        return super().characters() + json_characters(self.tools)

    @property
    def counted(self) -> bool:
        options = self.stream_options
        return bool(options and options.include_usage and options.continuous_usage_stats)


REQUESTS: Mapping[LlmEngine, type[ChatRequest]] = {"transformers": ChatRequest, "vllm": VllmRequest}


class InvalidKey(InvalidRequest):
    def __init__(self, message: str, param: str | None) -> None:
        super().__init__(message, param)
        self.param = param
        """The path of the key, such as `messages[0].content[1]`; None: the request as a whole."""


class UnknownModel(NotFound):
    param = "model"


def parse(document: Mapping[str, Any], engine: LlmEngine = "transformers") -> ChatRequest:
    """Raises InvalidKey, which names the wrong keys and quotes none of the content."""
    try:
        return REQUESTS[engine].model_validate(document)
    except ValidationError as error:
        raise invalid(error) from None


def invalid(error: ValidationError) -> InvalidKey:
    """Returns an error that names the first problems; limits their number and the time spent."""
    count = error.error_count()
    if count > MOST_PROBLEMS:
        return InvalidKey(f"the request: {count} keys or values are not supported here", None)
    problems = error.errors(include_input=False, include_url=False)
    said = [f"{place(one['loc']) or 'the request'}: {reason(one)}" for one in problems[:MOST_NAMED]]
    if count > MOST_NAMED:
        said.append(f"and {count - MOST_NAMED} more")
    return InvalidKey("; ".join(said), place(problems[0]["loc"]) or None)


def place(keys: Sequence[int | str]) -> str:
    """The path of a key: `messages[0].content[1].text`. Unknown keys are cut short."""
    if keys[2:3] == ("content",):
        keys = (*keys[: MESSAGE_PART - 1], *keys[MESSAGE_PART:])
    if keys[:1] in {("response_format",), ("tool_choice",)}:
        keys = (*keys[:1], *keys[2:])  # pydantic names its type, too
    named = (f"[{key}]" if isinstance(key, int) else f".{key[:MOST_KEY]}" for key in keys)
    return "".join(named).removeprefix(".")


def reason(problem: Mapping[str, Any]) -> str:
    if problem["type"] == "extra_forbidden":
        return "not supported here; leave it out"
    if problem["type"] == "missing":
        return "missing; add it"
    said = str(problem["msg"])
    if problem["type"] == "value_error":
        return said.removeprefix("Value error, ")  # added by pydantic to our validators' messages
    return f"wrong value; {said[0].lower()}{said[1:]}"


def item(where: str, part: ImagePart | VideoPart) -> RequestItem:
    """Returns the image or video as an item to be admitted. Raises InvalidKey."""
    kind = KINDS[part.type]
    url = part.image_url.url if isinstance(part, ImagePart) else part.video_url.url
    if not is_data_url(url):
        if "://" not in url:
            shown = url if len(url) <= MOST_SHOWN else url[:MOST_SHOWN] + "..."
            raise InvalidKey(
                f"{where}: {shown!r} is neither a data: URL nor an https URL: send "
                f"data:{EXAMPLES[kind]};base64,...",
                where,
            )
        return RequestItem(kind, None, url)
    try:
        media_type, encoded = split_data_url(url, kind, where)
        if kind == "video" and media_type == FRAMES:
            frames = (from_base64(frame, where) for frame in encoded.split(","))
            return RequestItem("video", frames=tuple(frames))
        return RequestItem(kind, from_base64(encoded, where), None)
    except WireError as error:
        raise InvalidKey(str(error), where) from None
