"""Defaults and hints for callers who say little: Accept, dtype, queries, HEAD, wrong bodies."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import threading
from base64 import b64encode
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from encoder_service.api import http as front
from encoder_service.api.http import build
from encoder_service.intake.limits import INLINE_BYTES
from encoder_service.wire.formats import JSON, MSGPACK, NPZ, SAFETENSORS
from tests.images import jpeg
from tests.responses import parse_response
from tests.unit.front_door import Fleet, client, service

IMAGE = {"content-type": "image/jpeg", "accept": "*/*"}
BODY = {"items": [{"data": b64encode(jpeg(64, 64)).decode()}]}


@pytest.mark.parametrize(
    ("sent", "content_type", "dtype"),
    [
        ({"json": BODY}, JSON, "float32"),
        ({"json": BODY | {"options": {"dtype": "float16"}}}, JSON, "float16"),
        ({"json": BODY | {"options": {"reference": True}}}, JSON, "bfloat16"),
        ({"json": BODY, "headers": {"accept": MSGPACK}}, MSGPACK, "bfloat16"),
        ({"content": jpeg(64, 64), "headers": IMAGE}, MSGPACK, "bfloat16"),
        ({"content": jpeg(64, 64), "headers": IMAGE | {"accept": JSON}}, JSON, "float32"),
        ({"content": jpeg(64, 64), "headers": IMAGE | {"accept": NPZ}}, NPZ, "float32"),
        (
            {"json": BODY | {"options": {"dtype": "bfloat16"}}, "headers": {"accept": NPZ}},
            NPZ,
            "float32",
        ),
        (
            {"json": BODY | {"options": {"dtype": "float16"}}, "headers": {"accept": NPZ}},
            NPZ,
            "float16",
        ),
        ({"files": {"image": jpeg(64, 64)}}, MSGPACK, "bfloat16"),
    ],
)
def test_what_a_caller_gets_who_does_not_say(
    sent: dict[str, Any], content_type: str, dtype: str
) -> None:
    fleet = Fleet()
    response = client(fleet).post("/v1/encode", **sent)
    assert (response.status_code, response.headers["content-type"]) == (200, content_type)
    assert parse_response(response.content, content_type)["items"]
    assert fleet.calls[0][0] == dtype


def test_a_bare_file_has_its_options_in_the_query() -> None:
    fleet = Fleet()
    query = {
        "dtype": "float16",
        "timeout_s": "3",
        "reference": "true",
        "evs_rate": "0.5",
        "on_error": "return",
        "encoding": "float",
    }
    sent = client(fleet).post(
        "/v1/encode", params=query, content=jpeg(64, 64), headers=IMAGE | {"accept": JSON}
    )
    assert sent.status_code == 200
    ((dtype, seconds),) = fleet.calls
    assert dtype == "float16"
    assert 2 < seconds <= 3
    torn = client(fleet).post("/v1/encode", params=query, content=b"x", headers=IMAGE)
    assert torn.status_code == 422  # `encoding` goes with JSON responses alone
    del query["encoding"]
    torn = client(fleet).post("/v1/encode", params=query, content=b"x", headers=IMAGE)
    assert torn.status_code == 200


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("dtype=float32&dtype=float16", "the query has an option twice"),
        ("dtipe=float32", "options.dtipe: unknown; known are "),
        ("dtype=int8", "options.dtype"),
        ("timeout_s=soon", "options.timeout_s"),
        ("timeout_s=1e9", "options.timeout_s"),
        ("evs_rate=1", "options.evs_rate"),
        ("reference=maybe", "options.reference"),
    ],
)
def test_queries_that_are_refused(query: str, says: str) -> None:
    sent = client(Fleet()).post(f"/v1/encode?{query}", content=jpeg(64, 64), headers=IMAGE)
    assert (sent.status_code, sent.json()["error"]["type"]) == (422, "invalid_option")
    assert says in sent.json()["error"]["message"]


def test_other_bodies_have_no_options_in_the_query() -> None:
    sent = client(Fleet()).post("/v1/encode?dtype=float32", json=BODY)
    assert (sent.status_code, "only a bare file" in sent.text) == (422, True)


def test_a_bare_file_with_curls_default_content_type_is_told_so() -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}
    sent = client(Fleet()).post("/v1/encode?dtype=float32", content=jpeg(64, 64), headers=form)
    assert sent.status_code == 422
    assert "such as image/jpeg, not 'application/x-www-form-urlencoded'" in sent.text


def test_the_document_names_the_options_of_the_query() -> None:
    document = client(Fleet()).get("/openapi.json").json()
    operation = document["paths"]["/v1/encode"]["post"]
    query = {one["name"] for one in operation["parameters"] if one["in"] == "query"}
    options = document["components"]["schemas"]["RequestOptions"]["properties"]
    assert query == set(options)
    # A generated client would send them beside a body, which has its own options.
    assert not any("default" in one["schema"] for one in operation["parameters"])
    assert "default" not in options["dtype"]  # a generated client would send it
    assert "406" in operation["responses"]


def test_an_accept_that_cannot_be_met() -> None:
    sent = client(Fleet()).post("/v1/encode", json=BODY, headers={"accept": "text/html"})
    assert (sent.status_code, sent.json()["error"]["type"]) == (406, "not_acceptable")
    assert MSGPACK in sent.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/", "/healthz", "/readyz"])
def test_probes_may_ask_for_the_head_alone(path: str) -> None:
    http = client(Fleet())
    assert http.head(path).status_code == http.get(path).status_code == 200


PACKED = {"content-encoding": "gzip"}


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (json.dumps(BODY).encode(), JSON),
        (jpeg(64, 64), "image/jpeg"),
        (bytes(3 * 2**20), "image/x"),
    ],
)
def test_bodies_in_gzip_are_read_as_if_they_were_not(body: bytes, content_type: str) -> None:
    http, headers = client(Fleet()), {"content-type": content_type, "accept": JSON}
    plain = http.post("/v1/encode", content=body, headers=headers)
    packed = http.post("/v1/encode", content=gzip.compress(body), headers=headers | PACKED)
    assert packed.status_code == plain.status_code
    assert packed.json().get("items") == plain.json().get("items")
    assert packed.json().get("error") == plain.json().get("error")


@pytest.mark.parametrize(
    ("body", "encoding", "status", "says"),
    [
        (gzip.compress(b"x"), "identity", 415, "say so with `Content-Encoding: gzip`"),
        (gzip.compress(gzip.compress(b"x")), "gzip", 415, "once"),
        (gzip.compress(b"x") * 2, "gzip", 400, "has data after its end"),
        (gzip.compress(b"x")[:-1], "gzip", 400, "cut short"),
        (b"", "gzip", 400, "cut short"),
        (b"xyz", "gzip", 400, "not gzip, or it is damaged"),
        (b"x", "br", 415, "content encoding 'br' is not supported"),
        (gzip.compress(bytes(2**24)), "gzip", 413, "limits.max_body_bytes"),
    ],
    ids=["unsaid", "twice", "members", "cut", "empty", "damaged", "brotli", "bomb"],
)
def test_packed_bodies_that_are_refused(body: bytes, encoding: str, status: int, says: str) -> None:
    headers = {"content-type": JSON, "content-encoding": encoding}
    sent = client(Fleet(), max_body_bytes=2**22).post("/v1/encode", content=body, headers=headers)
    assert sent.status_code == status
    assert says in sent.json()["error"]["message"]


def test_large_responses_are_packed_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def compressed(data: bytes, level: int) -> bytes:
        threads.append(threading.current_thread().name)
        return gzip.compress(data, level)

    monkeypatch.setattr(front, "gzip", SimpleNamespace(compress=compressed))
    files = [("image", jpeg(1024, 1024))] * 4
    http = client(Fleet())
    plain, packed = (
        http.post("/v1/encode", files=files, headers={"accept": JSON, "accept-encoding": encoding})
        for encoding in ("identity", "gzip")
    )
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.json()["items"] == plain.json()["items"]
    assert len(plain.content) > INLINE_BYTES
    assert [name.startswith("asyncio_") for name in threads] == [True]


def test_a_bomb_is_unpacked_no_further_than_the_limit() -> None:
    one, most_bytes = service(Fleet(), max_body_bytes=2**22), 0
    bomb = gzip.compress(bytes(2**28))

    async def run() -> httpx.Response:
        nonlocal most_bytes
        transport = httpx.ASGITransport(build(one))
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as http:
            call = asyncio.create_task(
                http.post("/v1/encode", content=bomb, headers=PACKED | {"content-type": JSON})
            )
            while not call.done():
                most_bytes = max(most_bytes, one.buffered.held_bytes)
                await asyncio.sleep(0)
            return await call

    assert asyncio.run(run()).status_code == 413
    assert 0 < most_bytes <= 2**22
    assert one.buffered.held_bytes == 0


@pytest.mark.parametrize(
    ("accept", "packed"), [(JSON, True), (MSGPACK, False), (SAFETENSORS, False), (NPZ, False)]
)
def test_only_answers_in_json_are_packed(accept: str, packed: bool) -> None:
    http, headers = client(Fleet()), {"accept": accept, "accept-encoding": "gzip"}
    sent = http.post("/v1/encode", json=BODY, headers=headers)
    assert sent.headers.get("content-encoding") == ("gzip" if packed else None)
    assert parse_response(sent.content, accept)["items"]
    plain = http.post("/v1/encode", json=BODY, headers=headers | {"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers


def test_the_page_of_the_documentation_loads_nothing_from_elsewhere() -> None:
    http = client(Fleet())
    page = http.get("/docs")
    addresses = re.findall(r"""(?:src|href)=["']([^"']+)""", page.text)
    assert len(addresses) == 3
    for address in addresses:
        assert address.startswith("/")
        assert http.get(address).status_code == 200
    assert "http" not in re.sub(r"<!--.*?-->", "", page.text, flags=re.DOTALL)
