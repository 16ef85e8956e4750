"""Chat completions over HTTP on real Ray: answers, streams, errors, replicas that die."""

from __future__ import annotations

import threading
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import ray

from tests.images import jpeg
from tests.serve.chats import LONG, MODEL, PATH, actors, asked, begun, count, read_events, text_of
from tests.serve.conftest import Cluster
from tests.serve.tiny import BEARER, MAX_ITEMS, running
from tests.videos import video
from tests.waiting import within

pytestmark = pytest.mark.extended

WAITING = 6


@pytest.fixture(scope="module")
def http(cluster: Cluster) -> Iterator[httpx.Client]:
    llm = {
        "autoscaling": {"max_replicas": 1},
        "num_gpus": 0,
        "num_cpus": 0.1,
        "device": "cpu",
        "drain_timeout_seconds": 2,
        "health_check_period_seconds": 1,
        "max_ongoing_requests": 2,
        "max_queued_requests": WAITING,
        "max_model_len": 2 * LONG,
    }
    headers = {"authorization": BEARER}
    with (
        running("chat", llm=llm),
        httpx.Client(base_url=cluster.http, timeout=100, headers=headers) as client,
    ):
        yield client


def test_an_answer_says_what_it_took(http: httpx.Client) -> None:
    answer = http.post(PATH, json=asked(jpeg(96, 64), jpeg(64, 64))).json()
    assert (answer["object"], answer["model"], answer["weights"]) == (
        "chat.completion",
        MODEL,
        "dummy",
    )
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "length"
    # A byte is a token. An image of n rows takes n + 2 tokens, with those around it.
    text = "<|im_start|>user\n" + "What is it?" + "<|im_end|>\n" + "<|im_start|>assistant\n"
    marks = text.count("<|im")
    letters = len(text.replace("<|im_start|>", "").replace("<|im_end|>", ""))
    assert answer["usage"]["prompt_tokens"] == marks + letters + (6 + 2) + (4 + 2)
    assert answer["usage"]["completion_tokens"] == 12


def test_a_stream_is_the_answer_in_pieces(http: httpx.Client) -> None:
    request = asked(jpeg(96, 64), max_tokens=60)
    whole = http.post(PATH, json=request).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    answer = http.post(PATH, json=request | options)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, usage = read_events(answer.text)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert text == whole["choices"][0]["message"]["content"]
    assert events[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert (usage["usage"], usage["choices"]) == (whole["usage"], [])


def test_the_image_matters(http: httpx.Client) -> None:
    images = [jpeg(96, 64), jpeg(96, 64, "astronaut.png")]
    texts = [text_of(http, asked(image, max_tokens=40)) for image in [*images, *images]]
    assert texts[:2] == texts[2:]
    assert texts[0] != texts[1]


def test_a_video_beside_an_image(http: httpx.Client) -> None:
    clips = [video(8, size=(96, 64), fps=4, counting=each) for each in (False, True)]
    urls = ["data:video/mp4;base64," + b64encode(clip).decode() for clip in clips]
    urls.append("data:video/jpeg;base64," + ",".join(2 * [b64encode(jpeg(96, 64)).decode()]))
    answers = []
    for url in urls:
        chat = asked(jpeg(64, 64), max_tokens=40)
        chat["messages"][0]["content"].insert(0, {"type": "video_url", "video_url": {"url": url}})
        answers.append(http.post(PATH, json=chat).json())
    plain = http.post(PATH, json=asked(jpeg(64, 64))).json()["usage"]["prompt_tokens"]
    # Each group has 6 rows, 2 marks and "<0.0 seconds>"; 2 marks surround all.
    assert [one["usage"]["prompt_tokens"] - plain for one in answers] == [44, 44, 23]
    assert len({one["choices"][0]["message"]["content"] for one in answers}) == 3


def test_a_seed_repeats_an_answer(http: httpx.Client) -> None:
    request = asked(jpeg(64, 64), temperature=1.0, max_tokens=30)
    one, same, other = (text_of(http, request | {"seed": seed}) for seed in (1, 1, 2))
    assert one == same
    assert one != other


def test_a_stop_text_ends_the_answer(http: httpx.Client) -> None:
    request = asked(jpeg(96, 64), max_tokens=40)
    text = text_of(http, request)
    stop = text[len(text) // 2]
    answer = http.post(PATH, json=request | {"stop": stop}).json()["choices"][0]
    assert answer["message"]["content"] == text[: text.index(stop)]
    assert answer["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("change", "status", "kind", "param", "words"),
    [
        ({"model": "gpt-5"}, 404, "not_found", "model", "qwen3vl-tiny"),
        ({"messages": []}, 400, "invalid_request", "messages", "messages"),
        ({"tools": [1]}, 400, "invalid_request", "tools", "tools: only with llm.engine: vllm"),
        ({"temperature": 3}, 400, "invalid_request", "temperature", "temperature"),
        (
            {"messages": [{"role": "user", "content": "a" * 9000}]},
            400,
            "invalid_request",
            None,
            "8000",
        ),
        (
            {"messages": [{"role": "user", "content": "<|image_pad|>"}]},
            400,
            "invalid_request",
            None,
            "own tokens",
        ),
    ],
)
def test_what_is_wrong_is_said_in_openai_s_shape(
    http: httpx.Client,
    change: dict[str, Any],
    status: int,
    kind: str,
    param: str | None,
    words: str,
) -> None:
    answer = http.post(PATH, json=asked() | change)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == (kind, kind, param)
    assert words in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_image_is_named(http: httpx.Client, stream: bool) -> None:
    torn = jpeg(320, 240)[:2000]  # its header is intact, so only the encoder notices
    for image, status in ((b"no image at all", 400), (torn, 400)):
        answer = http.post(PATH, json=asked(jpeg(64, 64), image, stream=stream))
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert (error["item"], error["param"]) == (1, "messages[0].content[1].image_url")


def test_too_many_images_too_large_a_body_no_token(http: httpx.Client) -> None:
    image = jpeg(32, 32)
    assert http.post(PATH, json=asked(*[image] * (MAX_ITEMS + 1))).status_code == 413
    assert http.post(PATH, json=asked(b"0" * 300_000)).status_code == 413
    assert http.post(PATH, json=asked(), headers={"authorization": ""}).status_code == 401


def test_models_and_readiness(http: httpx.Client) -> None:
    (model,) = http.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["weights"]) == (MODEL, "model", "dummy")
    assert http.get("/readyz").json() == {"ready_replicas": 2, "ready_llm_replicas": 1}


def test_who_hangs_up_ends_the_generation(http: httpx.Client) -> None:
    before = count(http, "encoder_chat_answers_total", finish="cancelled")
    with begun(http):
        pass
    # LONG tokens were requested, so the answer ended because nobody reads it, not by its length.
    within(60, lambda: count(http, "encoder_chat_answers_total", finish="cancelled") == before + 1)


def test_what_is_too_much_waits_or_is_refused(http: httpx.Client) -> None:
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(http.post(PATH, json=asked(jpeg(64, 64))))

    callers = [threading.Thread(target=ask) for _ in range(2 * WAITING)]
    with begun(http):  # nothing else is generated until it ends, which may be soon
        for caller in callers:
            caller.start()
        within(60, lambda: bool(answers))
    for caller in callers:
        caller.join(timeout=100)
    refused = answers[0]  # waiting requests are answered later
    assert refused.status_code == 429
    assert refused.json()["error"]["type"] == "overloaded"
    assert int(refused.headers["retry-after"]) >= 1
    assert {answer.status_code for answer in answers} == {200, 429}


@pytest.mark.parametrize("deployment", ["Encoder", "Router"])
def test_who_encodes_dies_under_chats(http: httpx.Client, deployment: str) -> None:
    """Callers send without pause before, during and after the loss. All get right answers."""
    request = asked(jpeg(96, 64))
    text = text_of(http, request)
    texts: list[str] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            texts.append(text_of(http, request))

    callers = [threading.Thread(target=ask) for _ in range(2)]
    for caller in callers:
        caller.start()
    try:
        within(60, lambda: len(texts) >= 4)
        ray.kill(actors(deployment)[0])
        after = len(texts) + 4
        within(100, lambda: len(texts) >= after)
    finally:
        stop.set()
        for caller in callers:
            caller.join(timeout=100)
    assert set(texts) == {text}
    within(100, lambda: len(actors(deployment)) == {"Encoder": 2, "Router": 1}[deployment])


def test_a_language_model_dies_under_its_answers(http: httpx.Client) -> None:
    request = asked(jpeg(96, 64), max_tokens=40)
    text = text_of(http, request)
    whole: list[str] = []
    caller = threading.Thread(target=lambda: whole.append(text_of(http, request)))
    with begun(http) as lines:
        caller.start()
        (victim,) = actors("Chat")
        ray.kill(victim)
        # The stream reports that it broke: it neither falls silent nor starts over.
        *_, last = read_events("\n".join(lines))
    assert last["error"]["type"] == "unavailable"
    # Requests that had not begun are answered by the replica that takes the dead one's place.
    caller.join(timeout=100)
    assert whole == [text]
    within(100, lambda: http.get("/readyz").json().get("ready_llm_replicas") == 1)
