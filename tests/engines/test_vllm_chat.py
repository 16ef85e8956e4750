"""Our own service with `llm.engine: vllm` against vLLM that encodes images itself: `make vllm`.

Runs in an environment that has vLLM and this project's dependencies.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm", reason="there is no vLLM here")

import ray

from encoder_service.bench.cluster import APPLICATION, cluster, logical_cpus, service
from encoder_service.config import ServiceOptions
from encoder_service.engines.vllm import content_id
from encoder_service.llm import vllm_engine
from encoder_service.llm.chat import BY_VALUE_SECONDS
from tests.engines import checkpoint
from tests.engines.servers import ENVIRONMENT, vllm
from tests.engines.test_vllm import FILES, PYTHON, TOWER, answer, ask, assert_same, shown
from tests.images import jpeg
from tests.processes import status
from tests.serve.chats import actors, count, read_events

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]

LONG = {"max_tokens": 900, "ignore_eos": True, "logprobs": False, "top_logprobs": 0}
"""Of an answer that takes seconds."""
PLAIN = {"logprobs": False, "top_logprobs": 0}
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
    found = tmp_path_factory.mktemp(request.param)
    checkpoint.write(found / "model", request.param)
    cpu = {"num_gpus": 0, "num_cpus": 0.1, "device": "cpu"}
    own = {"id": str(found / "model"), "dtype": "float32"}
    args = {"enforce_eager": True, "max_num_seqs": 8, "gpu_memory_utilization": 0.05}
    args |= {"max_num_batched_tokens": STEP_TOKENS}
    options = ServiceOptions.model_validate(
        {
            "model": own,
            "encoder": cpu | {"replicas": 1},
            "router": {"num_cpus": 0.1},
            "ingress": {"num_cpus": 0.1},
            "references": {"max_bytes": KEPT_BYTES},
            "llm": cpu
            | {"engine": "vllm", "max_model_len": 1024, "engine_args": args}
            | {"timeout_seconds": 400, "health_check_period_seconds": 1},
        }
    )
    os.environ.update(ENVIRONMENT)  # of Ray's processes, too
    with ExitStack() as stack:
        where = stack.enter_context(cluster(logical_cpus(options), object_store_bytes=400_000_000))
        stack.enter_context(service(options, where))
        http = stack.enter_context(httpx.Client(base_url=where.http, timeout=500, trust_env=False))
        yield Ours(request.param, found, http)


@pytest.fixture(scope="module")
def whole(ours: Ours) -> Iterator[str]:
    """URL of a vLLM with the same model that encodes images itself."""
    with vllm(PYTHON, ours.folder, "whole", limit_mm_per_prompt=TOWER) as url:
        yield url


def within(seconds: float, holds: Callable[[], bool]) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


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


def test_what_vllm_refuses_is_said_to_the_client(ours: Ours) -> None:
    wrong = {"name": "wrong", "schema": {"type": "no such type"}}
    refused = {"response_format": {"type": "json_schema", "json_schema": wrong}}
    unknown = {"logit_bias": {"1000000": 1}}
    for more in (refused, unknown, {"tools": [{"type": "function"}]}):
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
