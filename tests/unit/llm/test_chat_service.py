"""The chat API around replicas in memory: what real ones cannot be made to do on demand."""

from __future__ import annotations

import asyncio
import json
import re
from base64 import b64encode
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from starlette.testclient import TestClient

from actors.errors import EmbeddingLost, EncodeFailed, InvalidMedia
from actors.families.registry import read
from actors.options import GraphOptions, ImagesKwargs, ModelOptions
from actors.types import ProcessorKwargs
from encoder_service.api.errors import AtItem
from encoder_service.api.http import build
from encoder_service.config import LimitOptions, LlmEngine, LlmOptions, ServiceOptions
from encoder_service.llm import http as chat_http
from encoder_service.llm import spec as llm_spec
from encoder_service.llm.calls import ChatCall, ChatEvent, Finish, Piece, SamplingParams
from encoder_service.llm.http import ATTEMPTS, ChatService, ReplicaLost
from encoder_service.llm.schema import (
    MOST_LEVELS,
    REQUESTS,
    ChatKwargs,
    ChatRequest,
    InvalidKey,
    SizeRange,
    parse,
)
from encoder_service.service import Service
from tests.images import jpeg
from tests.unit.front_door import Fleet
from tests.videos import video

MODEL = ModelOptions(id="qwen3vl-tiny", load_format="dummy")
PATH = "/v1/chat/completions"
WHOLE = (Piece("one"), Piece(" two"), Finish(("stop",), 5, 2))
HELLO: dict[str, Any] = {"model": MODEL.id, "messages": [{"role": "user", "content": "hello"}]}
Script = Sequence[ChatEvent | BaseException]


class Replicas:
    """Each call plays the next script; an exception in it is raised there."""

    def __init__(self, *scripts: Script, ready: int = 1, waits: bool = False) -> None:
        self.scripts = list(scripts)
        self.ready = ready
        self.waits = waits
        self.calls: list[ChatCall] = []
        self.closed = 0

    async def complete(self, call: ChatCall) -> AsyncGenerator[ChatEvent]:
        self.calls.append(call)
        try:
            if self.waits:
                await asyncio.Event().wait()
            for event in self.scripts.pop(0):
                if isinstance(event, BaseException):
                    raise event
                yield event
        finally:
            self.closed += 1

    async def ready_replicas(self) -> int:
        return self.ready


def client(
    replicas: Replicas,
    own: ModelOptions = MODEL,
    graphs: GraphOptions | None = None,
    **options: Any,
) -> TestClient:
    llm = LlmOptions(num_gpus=0, device="cpu", **options)
    service_options = ServiceOptions(
        model=own, llm=llm, limits=LimitOptions(max_items=2), graphs=graphs or GraphOptions()
    )
    spec = read(own)
    service = Service(service_options, spec, Fleet())
    chat = ChatService(llm, llm_spec.read(llm, MODEL, spec), service.admission, replicas)
    app = build(service)
    chat_http.add(app, service, chat)
    return TestClient(app)


def image(data: bytes) -> dict[str, Any]:
    return linked(f"data:;base64,{b64encode(data).decode()}")


def linked(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def clip(url: str) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}}


def events(body: str) -> list[Any]:
    return [json.loads(one) for one in body.split("data: ")[1:-1]]


@pytest.mark.parametrize("detail", ["auto", "low", "high"])
def test_what_is_asked_reaches_the_model(detail: str) -> None:
    replicas = Replicas(WHOLE)
    picture = image(jpeg(64, 32))
    picture["image_url"]["detail"] = detail
    content = [{"type": "text", "text": "see: "}, picture]
    answer = client(replicas).post(
        PATH,
        json={
            "model": MODEL.id,
            "messages": [
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": content},
            ],
            "max_completion_tokens": 7,
            "top_p": 0.5,
            "stop": "x",
            "seed": 3,
        },
    )
    assert answer.json()["choices"][0]["message"]["content"] == "one two"
    assert answer.json()["usage"]["total_tokens"] == 7
    (call,) = replicas.calls
    assert call.messages == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "see: "}, {"type": "image"}]},
    )
    assert [one.plan.tokens for one in call.media] == [6]
    assert call.sampling == SamplingParams(max_tokens=7, top_p=0.5, stop=("x",), seed=3)


def tokens_of(
    part: dict[str, Any],
    model: ModelOptions = MODEL,
    graphs: GraphOptions | None = None,
    **request: Any,
) -> list[int]:
    """Tokens of the images and videos of a chat with this part."""
    replicas = Replicas(WHOLE)
    messages = [{"role": "user", "content": [part]}]
    answer = client(replicas, model, graphs).post(
        PATH, json=HELLO | {"messages": messages} | request
    )
    assert answer.status_code == 200, answer.text
    return [one.plan.tokens for call in replicas.calls for one in call.media]


def detailed(detail: str) -> dict[str, Any]:
    part = image(jpeg(1200, 800))
    part["image_url"]["detail"] = detail
    return part


def test_detail_chooses_the_pixels_of_an_image() -> None:
    assert [tokens_of(detailed(each)) for each in ("auto", "low", "high")] == [[950], [247], [950]]
    small = MODEL.model_copy(update={"images_kwargs": ImagesKwargs(max_pixels=100_000)})
    budgets = GraphOptions(token_budgets=(64, 1024))
    found = [tokens_of(detailed(each), small) for each in ("auto", "low", "high")]
    assert found == [[96], [96], [96]], "the largest budget is that of 100,000 pixels"
    found = [tokens_of(detailed(each), small, graphs=budgets) for each in ("auto", "low", "high")]
    assert found == [[96], [96], [950]]


@pytest.mark.parametrize(
    ("kwargs", "tokens"),
    [
        ({"max_pixels": 65536}, 54),
        ({"min_pixels": 1_000_000, "fps": 2, "do_sample_frames": True}, 1014),
        ({"size": {"shortest_edge": 4096, "longest_edge": 65536}}, 54),
    ],
)
def test_pixels_in_vllm_s_words(kwargs: dict[str, Any], tokens: int) -> None:
    assert tokens_of(image(jpeg(1200, 800)), mm_processor_kwargs=kwargs) == [tokens]


def test_detail_takes_precedence_over_min_pixels() -> None:
    for kwargs in ({"min_pixels": 1_000_000}, {"size": {"shortest_edge": 1_000_000}}):
        assert tokens_of(detailed("low"), mm_processor_kwargs=kwargs) == [247]
    assert tokens_of(detailed("high"), mm_processor_kwargs={"min_pixels": 1_000_000}) == [1014]


def test_frames_in_vllm_s_words() -> None:
    film = video(40, size=(64, 48), fps=10)
    part = {
        "type": "video_url",
        "video_url": {"url": f"data:video/mp4;base64,{b64encode(film).decode()}"},
    }
    assert tokens_of(part) == [16]
    assert tokens_of(part, mm_processor_kwargs={"fps": 1}) == [8]
    assert tokens_of(part, mm_processor_kwargs={"num_frames": 20}) == [40]


def test_a_size_of_all_frames_is_not_that_of_each() -> None:
    film = b64encode(video(8)).decode()
    part = {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{film}"}}
    chat = HELLO | {"messages": [{"role": "user", "content": [part]}]}
    chat |= {"mm_processor_kwargs": {"size": {"longest_edge": 65536}}}
    answer = client(Replicas()).post(PATH, json=chat)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "mm_processor_kwargs")
    assert "give min_pixels and max_pixels, those of each frame" in answer.text


@pytest.mark.parametrize("kwargs", [{"max_pixels": 2**30}, {"max_patches": 2}])
def test_kwargs_that_the_model_does_not_take_are_the_param(kwargs: dict[str, int]) -> None:
    chat = HELLO | {"messages": [{"role": "user", "content": [image(jpeg(64, 32))]}]}
    answer = client(Replicas()).post(PATH, json=chat | {"mm_processor_kwargs": kwargs})
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, "mm_processor_kwargs")


def test_glm_counts_an_image_once_for_each_of_two_frames() -> None:
    glm = read(ModelOptions(id="glm41v-9b", load_format="dummy"))
    kwargs = ChatKwargs(size=SizeRange(shortest_edge=12545, longest_edge=65536))
    assert chat_http.kwargs_of(kwargs, [], glm) == ProcessorKwargs(6273, 32768)


@pytest.mark.parametrize("stream", [False, True])
def test_a_replica_lost_before_its_first_word_costs_time_alone(stream: bool) -> None:
    lost = ReplicaLost("gone")
    replicas = Replicas([lost], [lost], WHOLE)
    answer = client(replicas).post(PATH, json=HELLO | {"stream": stream})
    assert (answer.status_code, len(replicas.calls)) == (200, 3)
    assert "two" in answer.text
    assert "error" not in answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_replicas_that_are_lost_one_after_the_other(stream: bool) -> None:
    replicas = Replicas(*[[ReplicaLost("gone")]] * ATTEMPTS)
    answer = client(replicas).post(PATH, json=HELLO | {"stream": stream})
    assert answer.status_code == 503
    assert answer.json()["error"]["retryable"]


def test_a_whole_answer_begins_anew_where_a_stream_cannot() -> None:
    broken: Script = [Piece("half"), ReplicaLost("gone")]
    assert "half" not in client(Replicas(broken, WHOLE)).post(PATH, json=HELLO).text
    replicas = Replicas(broken, WHOLE)
    answer = client(replicas).post(PATH, json=HELLO | {"stream": True})
    *_, half, last = events(answer.text)
    assert half["choices"][0]["delta"] == {"content": "half"}
    assert last["error"]["type"] == "unavailable"
    assert answer.text.endswith("data: [DONE]\n\n")
    assert (len(replicas.calls), replicas.closed) == (1, 1)


def test_a_whole_answer_begins_anew_if_rows_are_lost_under_it() -> None:
    """vLLM reads the rows of a preempted completion again."""
    broken: Script = [Piece("half"), EmbeddingLost("gone")]
    replicas = Replicas(broken, WHOLE)
    answer = client(replicas).post(PATH, json=HELLO)
    assert answer.json()["choices"][0]["message"]["content"] == "one two"
    assert len(replicas.calls) == 2
    assert client(Replicas(*[broken] * ATTEMPTS)).post(PATH, json=HELLO).status_code == 503
    replicas = Replicas([EmbeddingLost("gone")])  # the replica has tried again itself
    assert client(replicas).post(PATH, json=HELLO).status_code == 503
    streamed = client(Replicas(broken)).post(PATH, json=HELLO | {"stream": True})
    assert "error" in events(streamed.text)[-1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "param"),
    [
        (AtItem(1, InvalidMedia("torn")), 400, "messages[0].content[2].image_url"),
        (EncodeFailed("broken"), 500, None),
        (KeyError("secret"), 500, None),
    ],
)
def test_errors_have_openai_s_shape(
    error: Exception, status: int, param: str | None, stream: bool
) -> None:
    content = [image(jpeg(32, 32)), {"type": "text", "text": "and"}, image(jpeg(32, 32))]
    request = HELLO | {"messages": [{"role": "user", "content": content}], "stream": stream}
    answer = client(Replicas([error])).post(PATH, json=request)
    assert answer.status_code == status
    found = answer.json()["error"]
    assert found["param"] == param
    assert found["code"] == found["type"]
    assert "secret" not in answer.text


TEXT = {"type": "text", "text": "and"}
TORN = {"type": "image_url", "image_url": {"url": "data:image/jpeg,abc"}}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [{}]}, "tools"),
        ({"unknown": 0}, "unknown"),
        ({"model": None}, "model"),
        ({"temperature": 3, "tools": [{}]}, "temperature"),
        ({"stream_options": {}}, None),
        (
            {"messages": [{"role": "user", "content": [TEXT, {"type": "text", "text": 1}]}]},
            "messages[0].content[1].text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].image_url.url",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "user", "content": [TEXT, TORN]}]},
            "messages[0].content[1].image_url",
        ),
    ],
)
def test_a_key_that_is_wrong_is_the_param(change: dict[str, Any], param: str | None) -> None:
    answer = client(Replicas()).post(PATH, json=HELLO | change)
    found = answer.json()["error"]
    assert (answer.status_code, found["param"]) == (400, param)
    assert (param or "the request") in found["message"]
    assert not re.search("Input should|Field required", found["message"])


@pytest.mark.parametrize("count", [30, 100_000])
def test_as_many_wrong_keys_as_there_may_be_are_a_short_message(count: int) -> None:
    wrong = {f"k{i}" + "x" * 200: 1 for i in range(count)}
    with pytest.raises(InvalidKey) as refused:
        parse(HELLO | wrong)
    said = refused.value.message
    assert len(said) < 2000
    if count == 30:
        assert said.count("not supported here") == 10
        assert said.endswith("; and 20 more")
        assert refused.value.param == "k0" + "x" * 98
    else:
        assert said == "the request: 100000 keys or values are not supported here"


def test_the_time_is_kept_and_the_generation_ended() -> None:
    replicas = Replicas(waits=True)
    answer = client(replicas, timeout_seconds=0.1).post(PATH, json=HELLO)
    assert answer.status_code == 504
    assert "llm.timeout_seconds" in answer.json()["error"]["message"]
    assert replicas.closed == 1


SAID = {"role": "assistant", "content": None}


def called(arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def nested(levels: int) -> Any:
    return [nested(levels - 1)] if levels else 0


CALL = called('{"a": 1}')
UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"tools": "a", "tool_choice": "none"}, "tools: wrong value"),
    ({"tool_choice": "required"}, "tool_choice: "),
    ({"store": True}, "store: only false is"),
    ({"service_tier": "flex"}, 'service_tier: only "auto" or "default" is'),
    ({"verbosity": "low"}, 'verbosity: only "medium" is'),
    ({"reasoning_effort": "none"}, "reasoning_effort: not supported here; leave it out"),
    ({"prompt_cache_retention": 24}, "prompt_cache_retention: "),
    ({"user": 1}, "user: "),
    ({"echo": True}, "echo: only false is"),
    ({"add_generation_prompt": False}, "add_generation_prompt: only true is"),
    ({"add_special_tokens": True}, "add_special_tokens: only false is"),
    ({"use_beam_search": True}, "use_beam_search: only false is"),
    ({"length_penalty": 2}, "length_penalty: only 1 is"),
    ({"include_stop_str_in_output": True}, "include_stop_str_in_output: only false is"),
    ({"skip_special_tokens": False}, "skip_special_tokens: only true is"),
    ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens: only true is"),
    ({"best_of": 2}, "best_of: not supported here; leave it out"),
    ({"n": 1.5}, "n: "),
    ({"stop": ["a"] * 17}, "stop: "),
    ({"stream": True, "stream_options": {"include_obfuscation": 1}}, ".include_obfuscation: "),
    ({"messages": [SAID | {"name": 1}]}, "messages[0].name: "),
    ({"messages": [SAID | {"tool_calls": [{}]}]}, "messages[0].tool_calls[0].function: missing"),
    ({"messages": [SAID | {"tool_call_id": "a"}]}, "tool_call_id: only of the role tool"),
    (
        {"messages": [{"role": "user", "content": "a", "tool_calls": [CALL]}]},
        "tool_calls: only of the role assistant",
    ),
    (
        {"messages": [SAID | {"tool_calls": [called({"a": nested(MOST_LEVELS)})]}]},
        f"messages[0].tool_calls[0].function.arguments: {MOST_LEVELS + 1} objects and lists inside",
    ),
    ({"messages": [SAID | {"tool_calls": [CALL] * 129}]}, "messages[0].tool_calls: wrong value"),
    ({"messages": [{"role": "tool", "tool_call_id": "1"}]}, "messages[0].content: missing"),
    ({"messages": [SAID | {"content": []}]}, "messages[0].content: wrong value"),
    ({"messages": [SAID | {"role": "user"}]}, "messages[0].content: missing; add it"),
    ({"messages": [{"role": "user"}]}, "messages[0].content: missing; add it"),
]
"""With either engine."""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *UNSUPPORTED,
        ({"n": 2}, "n: only 1 is supported here"),
        ({"logprobs": True}, "logprobs: only false is supported here"),
        ({"top_logprobs": 5}, "top_logprobs: only 0 is"),
        ({"frequency_penalty": 0.5}, "frequency_penalty: only 0 is"),
        ({"logit_bias": {"5": 1}}, "logit_bias: only {} is"),
        ({"response_format": {"type": "json_object"}}, 'response_format: only {"type": "text"} is'),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"stop": ""}, "stop[0]: "),
        ({"stop": False}, "stop: "),
        ({"stop": "a" * 1001}, "stop[0]: "),
        ({"messages": [{"role": "user", "content": ""}] * 5000}, "messages: "),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 2000}]},
            "messages[0].content: ",
        ),
        (
            {"stream_options": {"include_usage": True}},
            "the request: stream_options: only with stream",
        ),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role: "),
        ({"tools": [{"type": "function"}]}, "tools: only with llm.engine: vllm"),
        ({"tools": [{}], "tool_choice": "auto"}, 'or with tool_choice "none"'),
        ({"mm_processor_kwargs": {"max_crops": 4}}, "mm_processor_kwargs.max_crops: not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "'image_url'"),
        ({"messages": [{"role": "user", "content": "a" * 10**6}]}, "maximum context length"),
        (
            {"messages": [{"role": "user", "content": [linked("data:,x")]}]},
            "messages[0].content[0].image_url",
        ),
        ({"messages": [{"role": "user", "content": [clip("data:,x")]}]}, "must read data:video/"),
        (
            {"messages": [{"role": "user", "content": [linked("photo.jpg")]}]},
            "'photo.jpg' is neither a data: URL nor an https URL: send data:image/jpeg;base64,...",
        ),
        (
            {"messages": [{"role": "user", "content": [clip("x" * 10**6)]}]},
            f"video_url: '{'x' * 40}...' is neither a data: URL nor an https URL: send data:video/",
        ),
        ({"messages": [{"role": "user", "content": [image(b"")] * 3}]}, "limits.max_items"),
        (
            {"messages": [{"role": "user", "content": [linked("https://example.org/a.png")]}]},
            "fetch.allow_hosts",
        ),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], words: str) -> None:
    answer = client(Replicas()).post(PATH, json=HELLO | change)
    assert answer.status_code in (400, 413)
    assert words in answer.json()["error"]["message"]


def test_images_beyond_the_context_are_not_encoded() -> None:
    replicas = Replicas(WHOLE)
    request = HELLO | {"messages": [{"role": "user", "content": [image(jpeg(64, 32))] * 2}]}
    answer = client(replicas, max_model_len=12).post(PATH, json=request)
    assert answer.status_code == 400
    assert "12 tokens; the maximum context length" in answer.json()["error"]["message"]
    assert not replicas.calls
    assert client(replicas, max_model_len=13).post(PATH, json=request).status_code == 200


HARMLESS: dict[str, Any] = {
    "n": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0.0,
    "logit_bias": {},
    "logprobs": False,
    "top_logprobs": 0,
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "none",
    "functions": [],
    "function_call": "auto",
    "parallel_tool_calls": True,
    "service_tier": "default",
    "store": False,
    "verbosity": "medium",
    "echo": False,
    "add_generation_prompt": True,
    "add_special_tokens": False,
    "use_beam_search": False,
    "length_penalty": 1.0,
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "user": "me",
    "safety_identifier": "me",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "metadata": {"a": "b"},
    "stream_options": None,
    "seed": None,
}


@pytest.mark.parametrize("values", [HARMLESS, dict.fromkeys(HARMLESS)])
def test_parameters_that_change_nothing_are_accepted(values: dict[str, Any]) -> None:
    replicas = Replicas(WHOLE, WHOLE)
    http = client(replicas)
    assert http.post(PATH, json=HELLO | values).status_code == 200
    assert http.post(PATH, json=HELLO).status_code == 200
    assert replicas.calls[0].sampling == replicas.calls[1].sampling


def test_one_may_be_written_with_a_point() -> None:
    streamed = client(Replicas(WHOLE)).post(PATH, json=HELLO | {"n": 1.0, "stream": True})
    assert streamed.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("engine", REQUESTS)
def test_streams_need_no_obfuscation(engine: LlmEngine) -> None:
    for value in (False, True):
        options = {"include_usage": True, "include_obfuscation": value}
        found = parse(HELLO | {"stream": True, "stream_options": options}, engine).stream_options
        assert found
        assert found.include_usage


@pytest.mark.parametrize("engine", REQUESTS)
def test_there_may_be_sixteen_stop_texts(engine: LlmEngine) -> None:
    stops = [str(i) for i in range(16)]
    assert parse(HELLO | {"stop": stops}, engine).sampling().stop == tuple(stops)


@pytest.mark.parametrize("engine", REQUESTS)
@pytest.mark.parametrize("said", [SAID, {"role": "assistant"}, SAID | {"content": ""}])
def test_what_an_assistant_said_may_be_nothing(said: dict[str, Any], engine: LlmEngine) -> None:
    (message,) = parse(HELLO | {"messages": [said]}, engine).messages
    assert message.for_template() == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("engine", REQUESTS)
def test_chat_templates_get_no_names(engine: LlmEngine) -> None:
    named = {"role": "user", "content": "hello", "name": "me"}
    (message,) = parse(HELLO | {"messages": [named]}, engine).messages
    assert message.for_template() == {"role": "user", "content": "hello"}


def test_a_seed_may_be_negative() -> None:
    replicas = Replicas(WHOLE)
    assert client(replicas).post(PATH, json=HELLO | {"seed": -(2**63)}).status_code == 200
    assert replicas.calls[0].sampling.seed == -(2**63)
    assert client(Replicas()).post(PATH, json=HELLO | {"seed": -(2**63) - 1}).status_code == 400


def test_empty_lists_of_an_answered_message_are_accepted() -> None:
    answered = {"role": "assistant", "content": "yes", "tool_calls": [], "annotations": []}
    replicas = Replicas(WHOLE)
    assert client(replicas).post(PATH, json=HELLO | {"messages": [answered]}).status_code == 200
    assert replicas.calls[0].messages == ({"role": "assistant", "content": "yes"},)
    wrong = answered | {"tool_calls": [{"id": "1"}]}
    refused = client(replicas).post(PATH, json=HELLO | {"messages": [wrong]})
    assert refused.json()["error"]["param"] == "messages[0].tool_calls[0].function"


def test_null_is_as_nothing_everywhere() -> None:
    """As clients send it for all that is optional, and messages as they were answered."""
    replicas = Replicas(WHOLE)
    picture = image(jpeg(64, 32))
    picture["image_url"]["detail"] = None
    answered = {"role": "assistant", "content": "yes", "refusal": None, "tool_calls": None}
    messages = [{"role": "user", "content": [picture], "name": None}, answered]
    request = dict.fromkeys(ChatRequest.model_fields.keys()) | HELLO | {"messages": messages}
    request |= {"reasoning_effort": None}
    assert client(replicas).post(PATH, json=request).status_code == 200
    kwargs = dict.fromkeys(ChatKwargs.model_fields)
    assert tokens_of(picture, mm_processor_kwargs=kwargs) == [6]
    streamed = HELLO | {"stream": True, "stream_options": {"include_usage": None}}
    assert client(Replicas(WHOLE)).post(PATH, json=streamed).status_code == 200


def test_the_openapi_document_describes_chats() -> None:
    document = client(Replicas()).get("/openapi.json").json()
    body = document["paths"][PATH]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ChatRequest"}
    shown = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert shown.keys() >= HARMLESS.keys() | HELLO.keys()
    assert shown["tool_choice"]["enum"] == ["none", "auto", None]
    content = document["components"]["schemas"]["ChatMessage"]["properties"]["content"]
    assert [one["type"] for one in content["anyOf"]] == ["string", "array", "null"]
    assert shown["tools"]["anyOf"] == [{"items": {}, "type": "array"}, {"type": "null"}]


def test_a_model_is_shown_by_its_name() -> None:
    http = client(Replicas())
    (entry,) = http.get("/v1/models").json()["data"]
    assert http.get(f"/v1/models/{MODEL.id}").json() == entry
    assert "no such path" in http.get("/v1/modelsx").text
    answer = http.get("/v1/models/Qwen/Qwen3-VL-8B-Instruct")
    found = answer.json()["error"]
    assert (answer.status_code, found["param"]) == (404, "model")
    assert "'Qwen/Qwen3-VL-8B-Instruct' is not served here" in found["message"]


def test_rows_that_will_be_dropped_of_a_video_do_not_count() -> None:
    film = b64encode(video(8, size=(96, 64))).decode()
    content = [clip(f"data:video/mp4;base64,{film}"), image(jpeg(64, 32))]
    request = HELLO | {"messages": [{"role": "user", "content": content}]}
    replicas = Replicas(WHOLE, WHOLE)
    assert client(replicas).post(PATH, json=request).status_code == 200
    assert client(replicas, video_pruning_rate=0.5).post(PATH, json=request).status_code == 200
    whole, pruned = (call.media for call in replicas.calls)
    assert [one.evs_rate for one in whole + pruned] == [0, 0, 0.5, 0]
    tokens = sum(one.plan.tokens for one in whole)
    few = client(Replicas(WHOLE), max_model_len=tokens).post(PATH, json=request)
    assert few.status_code == 400
    fits = client(Replicas(WHOLE), max_model_len=tokens, video_pruning_rate=0.5)
    assert fits.post(PATH, json=request).status_code == 200


def test_a_body_that_is_no_json() -> None:
    assert client(Replicas()).post(PATH, content=b"{").status_code == 400


def test_not_ready_without_a_language_model() -> None:
    assert client(Replicas(ready=0)).get("/readyz").status_code == 503
    assert client(Replicas()).get("/readyz").json()["ready_llm_replicas"] == 1


def test_without_a_language_model_there_is_no_chat() -> None:
    options = ServiceOptions(model=MODEL)
    app = build(Service(options, read(MODEL), Fleet()))
    assert TestClient(app).post(PATH, json=HELLO).status_code == 404
