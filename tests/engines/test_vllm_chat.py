"""Our own service with `llm.engine: vllm` against vLLM that encodes images itself: `make vllm`.

Runs in an environment that has vLLM and this project's dependencies.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm", reason="there is no vLLM here")

import ray

from actors.errors import ConfigError
from encoder_service.bench.cluster import APPLICATION, cluster, logical_cpus, service
from encoder_service.config import ServiceOptions
from encoder_service.engines.vllm import content_id
from encoder_service.llm import vllm_engine
from encoder_service.llm.calls import ToolUse
from encoder_service.llm.embedder import BY_VALUE_SECONDS
from encoder_service.llm.tool_calls import ToolParsers
from tests.engines import checkpoint
from tests.engines.servers import ENVIRONMENT, vllm
from tests.engines.test_vllm import FILES, PYTHON, TOWER, answer, ask, assert_same, shown
from tests.images import jpeg
from tests.processes import status
from tests.serve.chats import actors, count, read_events
from tests.waiting import within

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]

LONG = {"max_tokens": 900, "ignore_eos": True, "logprobs": False, "top_logprobs": 0}
"""Of an answer that takes seconds."""
PLAIN = {"logprobs": False, "top_logprobs": 0}


def weather(parameters: Any) -> dict[str, Any]:
    function = {"name": "weather", "parameters": parameters, "strict": True}
    return {"type": "function", "function": function}


WEATHER = weather(
    {
        "type": "object",
        "properties": {"city": {"enum": ["Paris"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
)
AT_ONCE = 4
STEP_TOKENS = 128
"""Fewer than an image of 512x512 pixels has rows."""
KEPT_BYTES = 400_000
"""Of the encoder: enough for small images, but not for Qwen3-VL's rows of 512x512 pixels."""


@dataclass(frozen=True)
class Ours:
    """Our service."""

    family: str
    folder: Path
    """The checkpoint is folder/model."""
    http: httpx.Client

    @property
    def url(self) -> str:
        return str(self.http.base_url)

    @property
    def model(self) -> str:
        return str(self.folder / "model")


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def ours(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ours]:
    with serving(request.param, tmp_path_factory.mktemp(request.param)) as found:
        yield found


@contextmanager
def serving(family: str, folder: Path, processes: int = 0, **llm: Any) -> Iterator[Ours]:
    """`processes`: that decode. `llm`: further options of the language model."""
    checkpoint.write(folder / "model", family)
    cpu = {"num_gpus": 0, "num_cpus": 0.1, "device": "cpu"}
    own = {"id": str(folder / "model"), "dtype": "float32"}
    args = {"enforce_eager": True, "max_num_seqs": 8, "gpu_memory_utilization": 0.05}
    args |= {"max_num_batched_tokens": STEP_TOKENS}
    options = ServiceOptions.model_validate(
        {
            "model": own,
            "encoder": cpu | {"replicas": 1},
            "router": {"num_cpus": 0.1},
            "ingress": {"num_cpus": 0.1},
            "references": {"max_bytes": KEPT_BYTES},
            "preprocess": {"processes": processes},
            "llm": cpu
            | {"engine": "vllm", "max_model_len": 1024, "engine_args": args}
            | {"tool_parser": "hermes"}
            | {"timeout_seconds": 400, "health_check_period_seconds": 1}
            | llm,
        }
    )
    os.environ.update(ENVIRONMENT)  # of Ray's processes, too
    with ExitStack() as stack:
        where = stack.enter_context(cluster(logical_cpus(options), object_store_bytes=400_000_000))
        stack.enter_context(service(options, where))
        http = stack.enter_context(httpx.Client(base_url=where.http, timeout=500, trust_env=False))
        yield Ours(family, folder, http)


@pytest.fixture(scope="module")
def whole(ours: Ours) -> Iterator[str]:
    """URL of a vLLM with the same model that encodes images itself."""
    tools = {"enable_auto_tool_choice": None, "tool_call_parser": "hermes"}
    with vllm(PYTHON, ours.folder, "whole", limit_mm_per_prompt=TOWER, **tools) as url:
        yield url


@pytest.mark.parametrize("files", sorted(FILES))
def test_the_same_tokens_and_probabilities(ours: Ours, whole: str, files: str) -> None:
    parts = [shown(file) for file in FILES[files]]
    assert_same(answer(ours.url, parts, model=ours.model), answer(whole, parts))


def test_images_of_one_size_are_not_taken_for_each_other(ours: Ours, whole: str) -> None:
    hits = count(ours.http, "vllm:prefix_cache_hits_total")
    for name in ("astronaut.png", "chelsea.png", "astronaut.png"):
        parts = [shown(jpeg(512, 512, name))]  # more rows than a block of the cache
        assert_same(answer(ours.url, parts, model=ours.model), answer(whole, parts))
    assert count(ours.http, "vllm:prefix_cache_hits_total") > hits


def test_a_stream_is_the_answer_in_pieces(ours: Ours) -> None:
    parts = [shown(file) for file in FILES["one image"]]
    whole = ask(ours.url, parts, model=ours.model).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *events, usage = read_events(ask(ours.url, parts, model=ours.model, **options).text)
    (expected,) = whole["choices"]
    choices = [event["choices"][0] for event in events]
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    tokens = [one for each in choices for one in each.get("logprobs", {"content": []})["content"]]
    assert (text, tokens) == (expected["message"]["content"], expected["logprobs"]["content"])
    assert len(events) > 3
    assert usage["usage"] == whole["usage"]


def test_parameters_of_openai(ours: Ours) -> None:
    def asking(**more: Any) -> httpx.Response:
        return ask(ours.url, [], model=ours.model, **PLAIN | more)

    def asked(**more: Any) -> Any:
        response = asking(**more)
        assert response.is_success, response.text
        return response.json()

    two = asked(n=2, temperature=1.0, seed=3)
    texts = [choice["message"]["content"] for choice in two["choices"]]
    assert [choice["index"] for choice in two["choices"]] == [0, 1]
    assert texts[0] != texts[1]
    assert two["usage"]["completion_tokens"] == 12
    events = read_events(asking(n=2, temperature=1.0, stream=True).text)
    assert {event["choices"][0]["index"] for event in events} == {0, 1}
    assert asked(n=2, temperature=1.0, seed=3)["choices"] == two["choices"]
    token = checkpoint.byte_tokenizer().convert_tokens_to_ids("b")
    likely = {"logit_bias": {str(token): 100}}
    (choice,) = asked(**likely)["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (6 * "b", "length")
    (choice,) = asked(**likely, stop_token_ids=[token])["choices"]
    assert choice["finish_reason"] == "stop"
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "empty", "schema": schema}}
    (choice,) = asked(response_format=wanted, max_tokens=40)["choices"]
    assert json.loads(choice["message"]["content"]) == {}


NAMED = {"type": "function", "function": {"name": "weather"}}
SPACES = checkpoint.byte_tokenizer().encode(" \n\r\t")
"""Unlikely in calls, because a random model would put them into JSON without end."""
CALLING = PLAIN | {
    "tools": [WEATHER],
    "max_tokens": 200,
    "logit_bias": dict.fromkeys(map(str, SPACES), -100),
}


@pytest.mark.parametrize("choice", ["auto", "required", NAMED], ids=["auto", "required", "named"])
def test_the_same_calls_as_in_vllm_s_own_server(ours: Ours, whole: str, choice: Any) -> None:
    content = [*(shown(file) for file in FILES["one image"]), {"type": "text", "text": "What?"}]
    function = {"name": "weather", "arguments": '{"city":   "Köln"}'}
    called = [{"id": "1", "type": "function", "function": function}]
    turns = [
        {"role": "user", "content": content},
        {"role": "assistant", "tool_calls": called},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "rain"}]},
    ]
    given = {"messages": turns, "tools": [WEATHER], "tool_choice": choice}
    if choice == "auto":  # a random model answers with text
        assert_same(answer(ours.url, [], model=ours.model, **given), answer(whole, [], **given))
        return
    found = []
    for url, model in ((ours.url, ours.model), (whole, "m")):
        more = CALLING | given | {"model": model, "parallel_tool_calls": False}
        response = ask(url, [], **more)
        assert response.is_success, response.text
        (answered,) = response.json()["choices"]
        functions = [call["function"] for call in answered["message"]["tool_calls"]]
        usage = response.json()["usage"]["prompt_tokens"]
        found.append((functions, answered["finish_reason"], usage))
    assert found[0] == found[1]
    assert len(found[0][0]) == 1


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("choice", ["required", "named"])
def test_a_tool_that_must_be_called(ours: Ours, choice: str, parallel: bool) -> None:
    """A random model calls tools only because their grammar makes it."""
    given = CALLING | {"parallel_tool_calls": parallel}
    given["tool_choice"] = NAMED if choice == "named" else choice
    response = ask(ours.url, [], model=ours.model, **given)
    assert response.is_success, response.text
    (answered,) = response.json()["choices"]
    calls = answered["message"].get("tool_calls")
    assert calls, answered
    assert answered["message"]["content"] is None
    for call in calls:
        assert call["id"]
        assert call["type"] == "function"
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    if choice == "named" or not parallel:  # the grammar ends after one call
        assert len(calls) == 1
        assert answered["finish_reason"] == ("stop" if choice == "named" else "tool_calls")
    events = read_events(ask(ours.url, [], model=ours.model, **given, stream=True).text)
    assert streamed(events) == [
        (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls
    ]
    assert events[-1]["choices"][0]["finish_reason"] == answered["finish_reason"]


def streamed(events: list[Any]) -> list[tuple[str, Any]]:
    """Names and arguments of the tool calls of a stream, put together as clients do."""
    found: list[dict[str, str]] = []
    for event in events:
        for part in event["choices"][0]["delta"].get("tool_calls", ()):
            if part["index"] == len(found):
                assert part["id"]
                assert part["type"] == "function"
                found.append({"name": part["function"]["name"], "arguments": ""})
            found[part["index"]]["arguments"] += part["function"]["arguments"]
    return [(one["name"], json.loads(one["arguments"])) for one in found]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_vllm_s_parser_finds_the_calls_of_a_stream(size: int) -> None:
    text = "Let me see. "
    for city in ("Paris", "Köln"):
        call = {"name": "weather", "arguments": {"city": city}}
        text += f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>\n"
    tokenizer = checkpoint.byte_tokenizer()
    parsers = ToolParsers("hermes", tokenizer)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    for parallel, stream in product((True, False), (True, False)):
        calls = parsers.begin(ToolUse((WEATHER,), "auto", parallel), [1], stream=stream)
        content, found = "", []
        for left, piece in zip(reversed(range(len(pieces))), pieces, strict=True):
            more, parts = calls.read(0, piece, tokenizer.encode(piece), finished=not left)
            content += more
            found.append({"choices": [{"delta": {"tool_calls": parts}}]})
        cities = ["Paris", "Köln"] if parallel else ["Paris"]
        assert streamed(found) == [("weather", {"city": city}) for city in cities]
        assert content.strip() == "Let me see."
        assert calls.reason(0, "stop") == "tool_calls"
    plain = parsers.begin(ToolUse((WEATHER,), "auto", True), [1], stream=True)
    assert plain.read(0, "none <tool", [2], finished=False) == ("none ", ())
    assert plain.reason(0, "stop") == "stop"


def test_a_parser_that_vllm_does_not_have_ends_the_start() -> None:
    with pytest.raises(ConfigError, match=r"'hermit', which vLLM does not know, only .*hermes"):
        ToolParsers("hermit", checkpoint.byte_tokenizer())


def test_what_vllm_refuses_is_said_to_the_client(ours: Ours) -> None:
    wrong = {"name": "wrong", "schema": {"type": "no such type"}}
    refused = {"response_format": {"type": "json_schema", "json_schema": wrong}}
    unknown = {"logit_bias": {"1000000": 1}}
    broken = weather({"type": "object", "properties": 5})
    tools = {"tools": [broken], "tool_choice": "required"}
    for more in (refused, unknown, tools, {"tools": [{"type": "function"}]}):
        response = ask(ours.url, [], model=ours.model, **PLAIN | more)
        assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request")
    assert ask(ours.url, [], model=ours.model).is_success


def test_requests_run_together_and_a_bad_image_fails_alone(ours: Ours) -> None:
    parts = [shown(file) for file in FILES["two images"]]
    torn = [shown(jpeg(320, 240)[:2000])]
    found: list[httpx.Response] = []
    most = 0.0

    def send(own: list[Any]) -> None:
        found.append(ask(ours.url, own, model=ours.model, **LONG | {"max_tokens": 200}))

    callers = [threading.Thread(target=send, args=(parts,)) for _ in range(AT_ONCE)]
    callers.append(threading.Thread(target=send, args=(torn,)))
    for caller in callers:
        caller.start()
    while any(caller.is_alive() for caller in callers):
        most = max(most, count(ours.http, "vllm:num_requests_running"))
    for caller in callers:
        caller.join()
    assert most == AT_ONCE
    (bad,) = [one for one in found if not one.is_success]
    assert (bad.status_code, bad.json()["error"]["item"]) == (400, 0)
    assert {one.json()["usage"]["completion_tokens"] for one in found if one is not bad} == {200}


@contextmanager
def begun(ours: Ours) -> Iterator[Iterator[str]]:
    """A long answer of which the first text has come: the lines that follow."""
    content = [*(shown(file) for file in FILES["one image"]), {"type": "text", "text": "What?"}]
    body = {"model": ours.model, "messages": [{"role": "user", "content": content}], "stream": True}
    with ours.http.stream("POST", "/v1/chat/completions", json=body | LONG) as response:
        lines = response.iter_lines()
        next(line for line in lines if '"content": "' in line and "role" not in line)
        yield lines


def test_who_hangs_up_frees_its_slot(ours: Ours) -> None:
    before = count(ours.http, "vllm:generation_tokens_total")
    with begun(ours):
        assert count(ours.http, "vllm:num_requests_running") == 1
    within(20, lambda: count(ours.http, "vllm:num_requests_running") == 0)
    within(20, lambda: count(ours.http, "encoder_chat_answers_total", finish="cancelled") >= 1)
    assert count(ours.http, "vllm:generation_tokens_total") < before + LONG["max_tokens"]


def test_rows_come_by_id_if_the_encoder_can_keep_them(ours: Ours) -> None:
    def loaded() -> float:
        return count(ours.http, "vllm:encoder_service_loaded_total")

    def sent(height: int, width: int) -> bool:
        assert ask(ours.url, [shown(jpeg(height, width))], model=ours.model).is_success
        return loaded() > before

    before, widths = loaded(), iter(range(64, 1024, 2))  # each another image
    within(BY_VALUE_SECONDS + 20, lambda: sent(64, next(widths)))
    assert count(ours.http, "vllm:encoder_service_unix_total") > 0
    with begun(ours):
        assert count(ours.http, "encoder_references") == 1
    within(10, lambda: count(ours.http, "encoder_references") == 0)  # whoever hangs up
    before, by_value = loaded(), count(ours.http, "encoder_chat_by_value_total")
    large = ours.family == "qwen3_vl"
    assert sent(512, 512) != large
    assert count(ours.http, "encoder_chat_by_value_total") - by_value == large


def test_rows_that_vllm_cannot_read_come_by_value(ours: Ours, whole: str) -> None:
    module: Any = vllm_engine

    def lose(_: Any) -> None:
        module.content_id = lambda reference: f"{reference.split('.')[0]}.{'A' * 32}"

    def keep(_: Any) -> None:
        module.content_id = content_id

    def failed() -> float:
        return count(ours.http, "vllm:encoder_service_failed_total")

    def sent(width: int) -> bool:
        parts = [shown(jpeg(96, width))]
        assert_same(answer(ours.url, parts, model=ours.model), answer(whole, parts))
        return failed() > before

    (chat,) = actors("Chat", APPLICATION)
    before, widths = failed(), iter(range(64, 1024, 2))
    ray.get(chat.__ray_call__.remote(lose))
    try:
        within(BY_VALUE_SECONDS + 20, lambda: sent(next(widths)))
    finally:
        ray.get(chat.__ray_call__.remote(keep))


def test_an_encoder_dies(ours: Ours) -> None:
    ray.kill(actors("Encoder", APPLICATION)[0])
    statuses: set[int] = set()

    def answered() -> bool:
        response = ask(ours.url, [shown(jpeg(128, 96))], model=ours.model)
        statuses.add(response.status_code)
        return response.is_success

    within(200, answered)
    assert statuses <= {200, 503}


def engine_process(chat: Any) -> int:
    """The process of vLLM's engine that a replica has started, which may lack vLLM's title."""
    (found,) = ray.get(chat.__ray_call__.remote(lambda _: [one.pid for one in active_children()]))
    return int(found)


def gone(process: int) -> bool:
    try:
        return status(process)[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("victim", ["engine", "replica"])
def test_a_language_model_dies_under_its_answers(ours: Ours, victim: str) -> None:
    if ours.family != "qwen3_vl":
        pytest.skip("one model is enough: its replacement takes a minute")
    expected = answer(ours.url, [shown(file) for file in FILES["one image"]], model=ours.model)
    (chat,) = actors("Chat", APPLICATION)
    process = engine_process(chat)
    with begun(ours) as lines:
        if victim == "engine":
            os.kill(process, signal.SIGKILL)
        else:
            ray.kill(chat)
        # The stream says that it is broken: it is neither silent nor begun again.
        *_, last = read_events("\n".join(lines))
    assert last["error"]["type"] == "unavailable"
    within(60, partial(gone, process))  # its memory is free again
    # What has not begun is answered by the replica that takes the dead one's place.
    found = answer(ours.url, [shown(file) for file in FILES["one image"]], model=ours.model)
    assert_same(found, expected)
