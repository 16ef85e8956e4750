"""The API contract over HTTP: formats, limits, errors, headers, endpoints, on a real service."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import httpx
import msgpack
import numpy as np
import pytest
import ray

from actors.rows.protocol import RowsPlace
from actors.rows.reader import RowsReader, RowsRefused
from encoder_service import Client, cli
from encoder_service.wire.formats import NPZ, SAFETENSORS, to_array
from tests.images import encoded, jpeg, opened
from tests.processes import actors
from tests.responses import parse_response
from tests.serve.conftest import Cluster
from tests.serve.tiny import BEARER, GRPC_PORT, MAX_BODY_BYTES, MAX_ITEMS, TOKEN, WIDTH
from tests.waiting import within

JSON = {"accept": "application/json"}


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[httpx.Client]:
    headers = {"authorization": BEARER}
    with httpx.Client(base_url=cluster.http, headers=headers, timeout=30) as one:
        yield one


def encode(client: httpx.Client, *files: bytes, **options: Any) -> httpx.Response:
    """Sends a form, as most clients do."""
    parts: list[Any] = [("image", ("a.jpg", one)) for one in files]
    return client.post("/v1/encode", files=parts, data={"options": json.dumps(options)})


def post(client: httpx.Client, document: Any) -> httpx.Response:
    return client.post("/v1/encode", json=document, headers=JSON)


def items(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = parse_response(
        response.content, response.headers["content-type"]
    )["items"]
    return found


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body: dict[str, Any] = response.json()["error"]
    assert set(body) == {"type", "message", "item", "retryable"}
    assert "Traceback" not in body["message"]
    return body


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_a_form_is_answered_in_msgpack(client: httpx.Client) -> None:
    response = encode(client, jpeg(96, 64), jpeg(64, 64), dtype="float32")
    document = parse_response(response.content, response.headers["content-type"])
    assert response.headers["content-type"] == "application/msgpack"
    assert (document["model"], document["weights"]) == ("qwen3vl-tiny", "dummy")
    assert set(document["timings"]) == {"queue_ms", "preprocess_ms", "encode_ms", "total_ms"}
    assert document["timings"]["total_ms"] >= document["timings"]["encode_ms"] > 0
    first, second = document["items"]
    assert (first["index"], first["grid_thw"], first["tokens"]) == (0, [1, 4, 6], 6)
    assert (second["index"], second["shape"]) == (1, [4, WIDTH])
    assert (first["type"], first["dtype"], first["deepstack"]) == ("image", "float32", 2)
    assert first["source"] in ("graph", "eager")
    assert len(first["digest"]) == 64
    rows = np.frombuffer(first["data"], np.float32).reshape(first["shape"])
    assert np.isfinite(rows).all()
    assert rows.std() > 0


def test_every_way_in_gives_the_same_rows(client: httpx.Client) -> None:
    image = jpeg(128, 96)
    entries = [{"type": "image", "data": image}]
    packed = msgpack.packb({"items": entries, "options": {"dtype": "float32"}})
    ways = [
        encode(client, image, dtype="float32"),
        post(client, {"items": [{"data": b64(image)}], "options": {"dtype": "float32"}}),
        client.post("/v1/encode", content=packed, headers={"content-type": "application/msgpack"}),
    ]
    first, *others = [items(way)[0] for way in ways]
    assert all(other["data"] == first["data"] for other in others)
    bare = client.post("/v1/encode", content=image, headers={"content-type": "image/jpeg"})
    assert items(bare)[0]["dtype"] == "bfloat16"
    assert items(bare)[0]["shape"] == first["shape"]


def test_every_way_out_gives_the_same_rows(client: httpx.Client) -> None:
    image = jpeg(128, 96)
    body = {"items": [{"data": b64(image)}], "options": {"dtype": "float32"}}
    found = {
        accept: items(client.post("/v1/encode", json=body, headers={"accept": accept}))[0]
        for accept in ("*/*", "application/json", "application/vnd.safetensors")
    }
    body["options"] = {"dtype": "float32", "encoding": "float"}
    found["lists"] = items(post(client, body))[0]
    reference = np.frombuffer(found.pop("*/*")["data"], np.float32)
    for name, one in found.items():
        np.testing.assert_array_equal(np.frombuffer(one["data"], np.float32), reference, name)


def test_head_gzip_and_accept_pass_the_proxy(client: httpx.Client) -> None:
    for path in ("/", "/healthz", "/readyz"):
        head, whole = client.head(path), client.get(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"] == whole.headers["content-type"]
    body = json.dumps({"items": [{"data": b64(jpeg(128, 96))}]}).encode()
    sent = {"content-type": "application/json", "accept-encoding": "identity"}
    plain = client.post("/v1/encode", content=body, headers=sent)
    assert "content-encoding" not in plain.headers
    rows = items(plain)[0]["data"]
    sent |= {"content-encoding": "gzip", "accept-encoding": "gzip"}
    for accept, packed in (("application/json", True), (SAFETENSORS, False), (NPZ, False)):
        headers = sent | {"accept": accept}
        answer = client.post("/v1/encode", content=gzip.compress(body), headers=headers)
        assert answer.headers.get("content-encoding") == ("gzip" if packed else None)
        assert answer.headers["content-type"] == accept
        if accept != SAFETENSORS:  # safetensors has bfloat16
            assert items(answer)[0]["data"] == rows
    assert error(client.post("/v1/encode", content=gzip.compress(body)[:-1], headers=sent), 400)
    assert error(client.post("/v1/encode", content=body, headers={"accept": "text/html"}), 406)


def test_float8_has_a_scale_for_each_row(client: httpx.Client) -> None:
    image = jpeg(128, 96)
    rows = np.frombuffer(items(encode(client, image, dtype="float32"))[0]["data"], "<f4")
    for accept in ("*/*", "application/json", SAFETENSORS):
        body = {"items": [{"data": b64(image)}], "options": {"dtype": "float8_e4m3"}}
        (one,) = items(client.post("/v1/encode", json=body, headers={"accept": accept}))
        found = to_array(one["data"], one["dtype"], one["shape"], one["scales"])
        assert len(one["data"]) == one["tokens"] * WIDTH
        largest = np.abs(rows.reshape(found.shape)).max(1, keepdims=True)
        assert (np.abs(found - rows.reshape(found.shape)) <= largest / 16).all()
    (kept,) = items(encode(client, image, dtype="float8_e4m3", reference=True))
    fetched = client.get(f"/v1/embeddings/{kept['reference']}", headers={"accept": SAFETENSORS})
    assert (items(fetched)[0]["data"], items(fetched)[0]["scales"]) == (one["data"], one["scales"])
    for accept, options in ((NPZ, {}), ("application/json", {"encoding": "float"})):
        body["options"] = {"dtype": "float8_e4m3"} | options
        refused = client.post("/v1/encode", json=body, headers={"accept": accept})
        assert "ask for float32" in error(refused, 422)["message"]


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float16", 2), ("float32", 4)])
def test_dtypes(client: httpx.Client, dtype: str, size: int) -> None:
    (one,) = items(encode(client, jpeg(96, 64), dtype=dtype))
    assert one["dtype"] == dtype
    assert len(one["data"]) == one["tokens"] * WIDTH * size


def test_the_smallest_image(client: httpx.Client) -> None:
    assert items(encode(client, encoded(opened().resize((1, 1)), "PNG")))[0]["tokens"] == 4


def test_one_bad_among_good(client: httpx.Client) -> None:
    files = (jpeg(96, 64), b"not an image", jpeg(96, 64, "chelsea.png"))
    good, bad, other = items(encode(client, *files, on_error="return"))
    assert good["tokens"] == other["tokens"] == 6
    assert set(bad) == {"index", "type", "error"}
    assert (bad["index"], bad["error"]["item"]) == (1, 1)
    assert error(encode(client, *files), 400)["item"] == 1


def test_nothing_but_bad(client: httpx.Client) -> None:
    (bad,) = items(encode(client, b"not an image", on_error="return"))
    assert bad["error"]["type"] == "invalid_request"


def test_a_truncated_image_fails_alone(client: httpx.Client) -> None:
    whole = jpeg(256, 256)
    good, torn = items(encode(client, whole, whole[: len(whole) // 2], on_error="return"))
    assert good["tokens"] == 64
    assert torn["error"]["type"] == "invalid_request"
    assert error(encode(client, whole, whole[: len(whole) // 2]), 400)["item"] == 1


@pytest.mark.parametrize(
    ("document", "status", "says"),
    [
        ({"items": []}, 400, "no items"),
        ({"items": [{}]}, 400, "items[0]"),
        ({"item": []}, 400, "item"),
        ({"items": [{"data": "***"}]}, 400, "base64"),
        ({"items": [{"data": b64(b"text")}]}, 400, ""),
        ({"items": [{"type": "smell", "data": b64(jpeg(96, 64))}]}, 400, "smell"),
        ({"items": [{"type": "audio", "data": b64(jpeg(96, 64))}]}, 415, "not a sound"),
        ({"items": [{"type": "video", "data": b64(jpeg(96, 64))}]}, 415, "video"),
        ({"items": [{"url": "https://example.com/a.jpg"}]}, 400, "example.com"),
        ({"items": [{"data": b64(encoded(opened().resize((800, 2)), "PNG"))}]}, 413, "aspect"),
        ({"items": [{"data": b64(jpeg(96, 64))}] * (MAX_ITEMS + 1)}, 413, "max_items"),
        ({"items": [{"data": b64(b"x" * MAX_BODY_BYTES)}]}, 413, "max_body_bytes"),
        ({"items": [{"data": b64(jpeg(96, 64))}], "options": {"dtipe": 1}}, 422, "dtipe"),
        ({"items": [{"data": b64(jpeg(96, 64))}], "options": {"dtype": "int8"}}, 422, "dtype"),
        ({"items": [{"data": b64(jpeg(96, 64))}], "options": {"timeout_s": -1}}, 422, "timeout_s"),
        ({"items": [{"data": b64(jpeg(96, 64))}], "options": {"timeout_s": 1e9}}, 422, "timeout_s"),
    ],
)
def test_what_is_wrong_is_named(
    client: httpx.Client, document: Any, status: int, says: str
) -> None:
    assert says in error(post(client, document), status)["message"]


def test_bodies_that_cannot_be_read(client: httpx.Client) -> None:
    def send(content: bytes, content_type: str) -> httpx.Response:
        return client.post("/v1/encode", content=content, headers={"content-type": content_type})

    error(send(b"{", "application/json"), 400)
    error(send(b"\xc1", "application/msgpack"), 400)
    error(send(b"--x", "multipart/form-data; boundary=x"), 400)
    error(send(b"--x", "multipart/form-data"), 400)
    error(send(b"hello", "text/plain"), 415)
    error(send(b"", "image/jpeg"), 400)
    error(client.post("/v1/encode", files={"photo": jpeg(96, 64)}), 400)
    error(client.post("/v1/encode", files={"image": jpeg(96, 64)}, data={"options": "["}), 400)


def test_answers_that_cannot_be_given(client: httpx.Client) -> None:
    files = {"image": jpeg(96, 64)}
    error(client.post("/v1/encode", files=files, headers={"accept": "text/html"}), 406)
    assert "encoding" in error(encode(client, jpeg(96, 64), encoding="float"), 422)["message"]
    error(client.post("/v1/encode?dtype=float32", files=files), 422)


def test_a_body_is_counted_when_its_length_is_not_declared(client: httpx.Client) -> None:
    chunks = (b"x" * 65536 for _ in range(1 + MAX_BODY_BYTES // 65536))
    sent = client.post("/v1/encode", content=chunks, headers={"content-type": "image/jpeg"})
    error(sent, 413)


def test_too_many_parts(client: httpx.Client) -> None:
    assert error(encode(client, *[jpeg(96, 64)] * (MAX_ITEMS + 1)), 413)["retryable"] is False
    assert error(encode(client, *[jpeg(96, 64)] * (MAX_ITEMS + 5)), 413)["retryable"] is False


def test_tokens(client: httpx.Client, cluster: Cluster) -> None:
    for header in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic bGV0IG1l"}):
        with httpx.Client(base_url=cluster.http, headers=header) as stranger:
            refused = stranger.get("/v1/model")
            assert error(refused, 401)["type"] == "unauthorized"
            assert refused.headers["www-authenticate"] == "Bearer"
            error(stranger.post("/v1/encode", files={"image": jpeg(96, 64)}), 401)
            for path in ("/healthz", "/readyz", "/metrics", "/docs"):
                assert stranger.get(path).status_code == 200


def test_routes_that_are_not_there(client: httpx.Client) -> None:
    missing = error(client.get("/v2/encode"), 404)
    assert missing["type"] == "not_found"
    assert "no such path: /docs lists" in missing["message"]
    for path in ("/v1/chat/completions", "/v1/models", "/v1/models/m"):
        lost = error(client.get(path), 404)
        assert "has no language model: set `llm`" in lost["message"]
    wrong = error(client.get("/v1/encode"), 405)
    assert wrong["type"] == "method_not_allowed"
    assert wrong["message"] == "GET /v1/encode: this path takes POST"


def test_the_model(client: httpx.Client) -> None:
    card = client.get("/v1/model").json()
    assert (card["model"], card["weights"], card["width"]) == ("qwen3vl-tiny", "dummy", WIDTH)
    assert card["graphs"]["token_budgets"] == {"default": [16, 64]}
    assert card["limits"]["max_items"] == MAX_ITEMS
    assert card["versions"]["ray"]


def test_request_ids(client: httpx.Client) -> None:
    assert client.get("/healthz", headers={"x-request-id": "mine"}).headers["x-request-id"] == (
        "mine"
    )
    assert client.get("/healthz").headers["x-request-id"]
    ours, sent = client.get("/healthz", headers={"x-request-id": "$(id)"}).headers.get_list(
        "x-request-id"
    )
    assert (len(ours), sent) == (32, "$(id)")


def test_health(client: httpx.Client) -> None:
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/readyz").json() == {"ready_replicas": 2}


def test_ray_refuses_who_has_no_token(cluster: Cluster) -> None:
    """The port on which Serve calls replicas, and unpickles what it receives."""
    (name,) = (one for one in actors() if "#Ingress#" in one)
    replica = ray.get_actor(name, namespace="serve")
    port = ray.get(replica.__ray_call__.remote(lambda self: self._replica_impl._internal_grpc_port))
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/ray.serve.ASGIService/HandleRequest")
        with pytest.raises(grpc.RpcError) as caught:
            call(b"")
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_metrics_of_all_replicas_are_on_one_page(client: httpx.Client) -> None:
    encode(client, jpeg(96, 64))
    page = client.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'encoder_requests_total{api="http",code="200",deployment="Ingress"' in page.text
    assert 'encoder_items_total{deployment="Encoder",replica="' in page.text
    assert 'encoder_scraped_replicas{deployment="Encoder"} 2.0' in page.text
    assert 'encoder_missing_replicas{deployment="Encoder"} 0.0' in page.text
    (unsent,) = re.findall(r"^encoder_unsent_bytes.* (\S+)$", page.text, re.MULTILINE)
    assert float(unsent) == 0, "answers that were read still count"


def test_budgets_are_planned_from_what_was_encoded(
    client: httpx.Client,
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def counted() -> int:
        return int(client.get("/v1/status").json()["item_tokens"].get("48", 0))

    before = counted()
    assert [one["tokens"] for one in items(encode(client, jpeg(256, 192)))] == [48]
    within(30, lambda: counted() != before)  # the status is about a second old
    monkeypatch.setenv("ENCODER_SERVICE_TOKEN", TOKEN)
    assert cli.main(["capture-plan", "--from", cluster.http, "--config", "configs/tiny.yaml"]) == 0
    assert "token_budgets: [" in capsys.readouterr().out


def test_the_documentation_describes_bodies_and_errors(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    operation = document["paths"]["/v1/encode"]["post"]
    assert set(operation["requestBody"]["content"]) == {
        "multipart/form-data",
        "application/json",
        "application/msgpack",
        "image/*",
        "video/*",
        "audio/*",
    }
    assert {"200", "400", "413", "415", "422", "429", "503", "504"} <= set(operation["responses"])
    references = {
        part.split('"')[0] for part in json.dumps(document).split("#/components/schemas/")[1:]
    }
    assert references <= set(document["components"]["schemas"])


@pytest.mark.parametrize("accept", ["application/msgpack", "application/json", SAFETENSORS])
def test_a_reference_is_fetched_until_it_is_released(client: httpx.Client, accept: str) -> None:
    headers = {"accept": accept}
    document = {"items": [{"data": b64(jpeg(96, 64))}], "options": {"reference": True}}
    (kept,) = items(client.post("/v1/encode", json=document, headers=headers))
    assert "data" not in kept
    path = f"/v1/embeddings/{kept.pop('reference')}"
    (found,) = items(client.get(path, headers=headers))
    data = found.pop("data")
    assert found == kept
    assert len(data) == kept["tokens"] * WIDTH * 2
    assert client.delete(path).status_code == 204
    assert error(client.get(path), 404)["type"] == "not_found"
    assert error(client.delete(path), 404)["type"] == "not_found"


@pytest.mark.parametrize("socket", ["unix", "tcp"])
def test_rows_of_an_id_are_read_from_its_replica(client: httpx.Client, socket: str) -> None:
    document = {"items": [{"data": b64(jpeg(96, 64))}], "options": {"reference": True}}
    (kept,) = items(client.post("/v1/encode", json=document))
    path = f"/v1/embeddings/{kept['reference']}"
    (found,) = items(client.get(path, headers={"accept": "application/msgpack"}))
    place = RowsPlace(**client.get(f"{path}/place").json())
    reader = RowsReader.connect(place if socket == "unix" else replace(place, unix="/nowhere"))
    assert reader
    assert reader.path == socket
    name = kept["reference"].split(".")[1]
    held = reader.hold(name)
    assert (held.shape, held.deepstack) == (tuple(kept["shape"]), kept["deepstack"])
    rows = bytearray(len(found["data"]))
    reader.read(name, memoryview(rows))
    assert rows == found["data"]
    with pytest.raises(RowsRefused, match="no embedding is kept"):
        reader.hold("x" * 32)
    assert client.delete(path).status_code == 204
    assert error(client.get(path), 404)
    reader.read(name, memoryview(rows))
    reader.close()
    assert error(client.get("/v1/embeddings/nobody.x/place"), 404)["type"] == "not_found"


def test_references_ask_for_the_token(client: httpx.Client) -> None:
    path = "/v1/embeddings/a.b"
    assert error(client.get(f"{path}/place", headers={"authorization": ""}), 401)
    assert error(client.get(path, headers={"authorization": ""}), 401)
    assert error(client.delete(path, headers={"authorization": ""}), 401)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_rows_come_from_the_encoders_themselves(cluster: Cluster, protocol: str) -> None:
    url = cluster.http if protocol == "http" else f"grpc://127.0.0.1:{GRPC_PORT}"
    files = [jpeg(32 * side, 64) for side in range(2, 2 + MAX_ITEMS)]
    with Client(url, TOKEN) as plain, Client(url, TOKEN, direct=True) as direct:
        expected, found = plain.encode(files), direct.encode(files)
        assert direct.client.direct
        assert not direct.client.direct.avoided
        kept = [one.reference for one in found]
    assert kept == [""] * MAX_ITEMS
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.dtype, one.digest) == (other.shape, other.dtype, other.digest)
        assert bytes(one.data) == bytes(other.data)
