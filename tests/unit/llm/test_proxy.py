"""The proxy between a client, the service in this process, and a vLLM stand-in over real HTTP."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import socket
import tracemalloc
from typing import Any

import httpx
import pytest
import torch

from actors.errors import Overloaded
from encoder_service import cli
from encoder_service.client import AsyncClient
from encoder_service.engines.openai_proxy import check_other
from tests import vllm_rules
from tests.images import jpeg
from tests.unit.proxied import WIDTH, Distinct, Vllm, another_service, chat, image, listening, told


def test_images_arrive_as_embeddings_that_vllm_reads() -> None:
    files = [jpeg(64, 64), jpeg(128, 64), jpeg(64, 64, "chelsea.png")]

    async def story(client: httpx.AsyncClient, vllm: Vllm) -> None:
        body = chat(*(image(file) for file in files), temperature=0.5, unknown={"kept": [1]})
        body["messages"][1]["content"][1]["uuid"] = "mine"
        answer = await client.post(
            "/v1/chat/completions?x=1", json=body, headers={"authorization": "Bearer mine"}
        )
        assert answer.status_code == 200
        assert answer.json() == {"id": "1", "choices": []}
        assert answer.headers["x-request-id"] == "abc"
        (request,) = vllm.requests
        assert request.headers["authorization"] == "Bearer mine"
        assert request.url.query == "x=1"
        got = json.loads(vllm.bodies[0])
        *parts, text = got["messages"][1]["content"]
        arrived = vllm_rules.embeddings(parts, WIDTH)
        async with listening(another_service()) as url, AsyncClient(url) as encoder:
            for one, given in zip(await encoder.encode(files), arrived, strict=True):
                assert torch.equal(given.view(torch.uint8), one.torch().view(torch.uint8))
        assert [part.get("uuid") for part in parts] == [None, "mine", None]
        assert text == {"type": "text", "text": "What?"}
        assert got | {"messages": 0} == body | {"messages": 0}
        assert got["messages"][0] == body["messages"][0]

    told(story)


def test_images_are_sized_as_vllm_would_size_them() -> None:
    async def story(client: httpx.AsyncClient, vllm: Vllm) -> None:
        body = chat(image(jpeg(640, 480)))
        kwargs: dict[str, Any]
        for kwargs, rows in (({}, 300), ({"max_pixels": 65536, "fps": 1}, 54)):
            await client.post("/v1/chat/completions", json=body | {"mm_processor_kwargs": kwargs})
            part, _ = json.loads(vllm.bodies[-1])["messages"][1]["content"]
            (arrived,) = vllm_rules.embeddings([part], WIDTH)
            assert len(arrived) == rows
        wrong = body | {"mm_processor_kwargs": {"max_pixels": 2**30}}
        answer = await client.post("/v1/chat/completions", json=wrong)
        assert answer.status_code == 422
        assert "max_pixels: 1073741824 is over" in answer.text

    told(story)


@pytest.mark.parametrize(
    ("url", "most", "words"),
    [
        ("https://a/b", 2**64, "max_pixels"),
        ("https://a/b", "\ud800", "max_pixels"),
        ("https://a/\ud800", 65536, "messages[1].content[0]"),
    ],
)
def test_what_cannot_be_sent_to_the_service_is_refused(url: str, most: Any, words: str) -> None:
    async def story(client: httpx.AsyncClient, vllm: Vllm) -> None:
        part = {"type": "image_url", "image_url": {"url": url}}
        body = chat(part) | {"mm_processor_kwargs": {"max_pixels": most}}
        answer = await client.post("/v1/chat/completions", content=json.dumps(body))
        assert answer.status_code == 400
        assert words in answer.text

    told(story)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_body_of_too_many_values_is_refused(path: str) -> None:
    async def story(client: httpx.AsyncClient, vllm: Vllm) -> None:
        answer = await client.post(path, content=b'{"a": [' + b"[]," * 2**20 + b"[]]}")
        assert answer.status_code == 400
        assert "values" in answer.text
        assert not vllm.bodies

    told(story)


def test_what_has_no_images_passes_byte_by_byte() -> None:
    async def story(client: httpx.AsyncClient, vllm: Vllm) -> None:
        body = b'{ "model":"m", "messages":[{"role":"user","content":"hi"}] }'
        await client.post("/v1/chat/completions", content=body)
        assert vllm.bodies == [body]
        answer = await client.get("/v1/models/a%2Fb?c=%20d", headers={"x-mine": "1"})
        assert answer.json() == {"path": "/v1/models/a%2Fb", "q": "c=%20d"}
        assert vllm.requests[1].headers["x-mine"] == "1"
        assert vllm.requests[1].headers["host"] != client.base_url.netloc.decode()
        # One connection for all: the server saw one port of ours.
        assert len({request.client.port for request in vllm.requests if request.client}) == 1

    told(story)


def test_headers_pass_whatever_their_bytes_but_those_of_the_connection() -> None:
    async def story(client: httpx.AsyncClient, vllm: Vllm) -> None:
        given = {b"x-user": b"Zo\xeb", b"x-hop": b"1", b"connection": b"close, X-Hop"}
        answer = await client.get("/v1/models", headers=given)
        assert answer.status_code == 200
        assert vllm.requests[0].headers["x-user"] == "Zoë"
        assert "x-hop" not in vllm.requests[0].headers

    told(story)


def test_a_header_that_never_ends_is_refused() -> None:
    async def story(client: httpx.AsyncClient, vllm: Vllm) -> None:
        host, port = client.base_url.host, client.base_url.port
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"GET / HTTP/1.1\r\nX: " + b"a" * 2**17)
        async with asyncio.timeout(10):
            assert (await reader.readline()).startswith(b"HTTP/1.1 400 ")
        writer.close()

    told(story)


def test_an_answer_streams() -> None:
    async def story(client: httpx.AsyncClient, vllm: Vllm) -> None:
        body = chat(image(jpeg(64, 64)), stream=True)
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            pieces = answer.aiter_raw()
            assert await anext(pieces) == b"data: 1\n\n"
            vllm.go_on.set()  # only now is there a second piece
            assert b"".join([piece async for piece in pieces]) == b"data: [DONE]\n\n"
            assert answer.headers["content-type"].startswith("text/event-stream")

    told(story)


def test_a_client_that_hangs_up_ends_the_servers_work() -> None:
    async def story(client: httpx.AsyncClient, vllm: Vllm) -> None:
        body = chat(stream=True)
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            await anext(answer.aiter_raw())
        await asyncio.wait_for(vllm.ended.wait(), 60)

    told(story)


def test_a_client_that_hangs_up_ends_work_that_has_no_answer_yet() -> None:
    async def story(client: httpx.AsyncClient, vllm: Vllm) -> None:
        with pytest.raises(httpx.TimeoutException):
            await client.post("/v1/chat/completions", json=chat(slow=True), timeout=0.5)
        await asyncio.wait_for(vllm.ended.wait(), 20)

    told(story)


def test_a_compressed_body_is_not_said_to_be_compressed() -> None:
    """It arrives decompressed."""

    async def story(client: httpx.AsyncClient, vllm: Vllm) -> None:
        body = json.dumps(chat()).encode()
        headers = {"content-encoding": "gzip"}
        content = gzip.compress(body)
        answer = await client.post("/v1/chat/completions", content=content, headers=headers)
        assert answer.status_code == 200
        assert vllm.bodies == [body]
        assert "content-encoding" not in vllm.requests[0].headers

    told(story)


def test_rows_count_as_buffered() -> None:
    async def story(client: httpx.AsyncClient, vllm: Vllm) -> None:
        body = chat(image(jpeg(640, 640)))
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 429
        assert "max_buffered_bytes" in answer.json()["error"]["message"]
        assert not vllm.bodies

    told(story, max_body_bytes=200_000, max_buffered_bytes=200_000)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url", "image_url": {"url": "http://a/b.jpg"}}, "or an https URL"),
        ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "or an https URL"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,a"}}, "is not base64"),
        ({"type": "image_url", "image_url": None}, "needs a url"),
        ({"type": "video_url", "video_url": {"url": "https://a/b.mp4"}}, "videos are not"),
        ({"type": "image_url", "image_url": {"url": "https://a/b.jpg"}}, "fetch.allow_hosts"),
        (image(b"no image"), "messages[1].content[0]"),
        # vLLM goes by the keys where there is no type, or a uuid.
        ({"image_url": "http://a/b.jpg"}, "or an https URL"),
        ({"type": "text", "uuid": "x", "image_url": {"url": "http://a/b"}}, "or an https URL"),
        ({"video_url": "http://a/b.mp4"}, "videos are not"),
    ],
)
def test_images_that_are_refused(part: dict[str, Any], message: str) -> None:
    async def story(client: httpx.AsyncClient, vllm: Vllm) -> None:
        answer = await client.post("/v1/chat/completions", json=chat(part))
        error = answer.json()["error"]
        assert 400 <= answer.status_code < 500
        assert message in error["message"]
        assert {"message", "type", "param", "code"} <= error.keys()
        assert not vllm.requests

    told(story)


EMBEDS = {"type": "image_embeds", "image_embeds": {"image_embeds": "AA==", "image_grid_thw": "AA"}}


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        ("chat/completions", chat(EMBEDS), "messages[1].content[0]: image_embeds"),
        ("chat/completions", chat({"image_embeds": None, "uuid": "x"}), "content[0]: image_embeds"),
        ("chat/completions", chat({"type": "video_embeds"}), "content[0]: video_embeds"),
        ("chat/completions", chat({"image_pil": 1}), "content[0]: image_pil"),
        ("completions", {"prompt_embeds": "AA=="}, "the body: prompt_embeds"),
        ("embeddings", chat(EMBEDS), "messages[1].content[0]: image_embeds"),
        ("../inference/v1/generate", {"features": {"kwargs_data": {}}}, "features: kwargs_data"),
    ],
)
def test_embeddings_of_the_clients_own_are_refused(path: str, body: Any, where: str) -> None:
    async def story(client: httpx.AsyncClient, vllm: Vllm) -> None:
        for content in (json.dumps(body), json.dumps(body).replace("embeds", r"\u0065mbeds")):
            for encoding in ("utf-8", "utf-16"):
                answer = await client.post(f"/v1/{path}", content=content.encode(encoding))
                assert answer.status_code == 400
                assert f"{where} is not accepted" in answer.json()["error"]["message"]
        assert not vllm.requests

    told(story)


def test_many_values_under_a_long_key_take_little_memory() -> None:
    body = json.dumps({"k" * 50_000: [0] * 10_000}).encode()
    tracemalloc.start()
    try:
        check_other(body)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 50 * len(body)


def test_a_key_of_its_own_is_asked_for_before_anything_is_encoded() -> None:
    fleet = Distinct()
    digest = hashlib.sha256(b"mine").hexdigest().upper()

    async def story(client: httpx.AsyncClient, vllm: Vllm) -> None:
        body = chat(image(jpeg(64, 64)))
        for header in ({}, {"authorization": "Bearer other"}, {"authorization": "Basic mine"}):
            answer = await client.post("/v1/chat/completions", json=body, headers=header)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "unauthorized"
            assert (await client.get("/v1/models", headers=header)).status_code == 401
        assert not vllm.requests
        assert not fleet.calls
        right = {"authorization": "Bearer mine"}
        answer = await client.post("/v1/chat/completions", json=body, headers=right)
        assert answer.status_code == 200
        assert vllm.requests[0].headers["authorization"] == "Bearer mine"
        assert fleet.calls

    told(story, fleet, digests=(digest,))


def test_a_key_in_the_place_of_its_digest_is_not_repeated(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["proxy", "--upstream", "http://a", "--token-sha256", "hunter2"]) == 1
    said = capsys.readouterr().err
    assert "--token-sha256 is not" in said
    assert "hunter2" not in said


def test_errors_of_the_server_are_its_own() -> None:
    async def story(client: httpx.AsyncClient, vllm: Vllm) -> None:
        answer = await client.post("/v1/chat/completions", json=chat(model="missing"))
        assert answer.status_code == 404
        assert answer.json() == {"error": {"message": "no such model", "code": 404}}

    told(story)


def test_a_busy_encoder_says_when_to_come_back() -> None:
    async def story(client: httpx.AsyncClient, vllm: Vllm) -> None:
        answer = await client.post("/v1/chat/completions", json=chat(image(jpeg(64, 64))))
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
        assert answer.json()["error"]["code"] == "overloaded"

    told(story, Distinct(Overloaded("full", 3)))


def test_a_server_that_is_not_there() -> None:
    async def story(client: httpx.AsyncClient, vllm: Vllm) -> None:
        answer = await client.post("/v1/chat/completions", json=chat())
        assert answer.status_code == 503
        assert "cannot be reached" in answer.json()["error"]["message"]

    told(story, upstream="http://127.0.0.1:9")


def test_bodies_are_bounded() -> None:
    async def story(client: httpx.AsyncClient, vllm: Vllm) -> None:
        for content in (b"x" * 2000, b"not json"):
            answer = await client.post("/v1/chat/completions", content=content)
            assert answer.status_code == (413 if len(content) > 1000 else 400)
            assert answer.json()["error"]["message"]
        answer = await client.post("/v1/chat/completions", json=chat(*[{"type": "image_url",
            "image_url": "https://a/b"}] * 2))  # fmt: skip
        assert answer.status_code == 413
        assert not vllm.requests

    told(story, max_body_bytes=1000, max_buffered_bytes=1000, max_items=1)


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (["proxy", "--upstream", "localhost:1"], "--upstream: "),
        (["proxy", "--upstream", "http://["], "--upstream: "),
        (["proxy", "--upstream", "http://"], "--upstream: "),
        (["proxy", "--upstream", "http://a:99999"], "--upstream: "),
        (["proxy", "--upstream", "http://a", "--encoder", "ftp://b"], "--encoder: "),
        (["sglang", "--encoder", "ftp://b"], "--encoder: "),
        (["sglang", "--network", "10.0.0.1/8"], "--network: "),
    ],
)
def test_addresses_that_are_none(
    arguments: list[str], wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 1
    assert wrong in capsys.readouterr().err


@pytest.mark.parametrize(
    ("port", "why"), [(None, "in use"), (70_000, "ports are 0 to 65535"), (-1, "ports are")]
)
def test_where_nobody_can_listen(
    port: int | None, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        chosen = str(port or taken.getsockname()[1])
        assert cli.main(["proxy", "--upstream", "http://127.0.0.1:1", "--port", chosen]) == 1
    told = capsys.readouterr().err
    assert f"--port {chosen}: " in told
    assert why in told
