"""Both clients against small real servers that speak the contract, over HTTP and over gRPC."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np
import pytest
import torch
from fastapi import FastAPI, Request, Response

import encoder_service
from actors.kernels.gemm.fp8 import quantised
from encoder_service.client import (
    AsyncClient,
    Client,
    DatasetOptions,
    Embedding,
    Frames,
    Input,
    ServiceError,
    Source,
)
from encoder_service.client.items import TOKEN, request_item, service_error
from encoder_service.client.transports import HttpTransport
from encoder_service.wire import documents as wire
from encoder_service.wire import encoder_pb2 as pb
from encoder_service.wire.encoder_grpc import add_EncoderServicer_to_server
from encoder_service.wire.formats import write_safetensors
from tests import images
from tests.responses import octets
from tests.unit.proxied import in_a_thread, listening

ROWS = torch.arange(8, dtype=torch.float32).view(4, 2) / 3
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
TIMINGS = {"queue_ms": 0.0, "preprocess_ms": 2.0, "encode_ms": 3.0, "total_ms": 9.0}
OVERLOADED = {"type": "overloaded", "message": "later", "item": None, "retryable": True}


def answer(index: int, data: bytes, dtype: str) -> dict[str, Any]:
    """An item of a response; b"bad" fails."""
    if data == b"bad":
        error = {"type": "invalid_media", "message": "no", "item": index, "retryable": False}
        return {"index": index, "type": "image", "error": error}
    scales = {}
    if dtype == "float8_e4m3":
        made = quantised(ROWS)
        rows, scales = made.values, {"scales": octets(made.scales)}
    else:
        rows = ROWS.to(DTYPES[dtype])
    return scales | {
        "index": index,
        "type": "image",
        "grid_thw": [1, 4, 4],
        "tokens": 4,
        "dtype": dtype,
        "shape": [4, 2],
        "data": rows.view(torch.uint8).numpy().tobytes(),
        "digest": str(len(data)),
        "source": "graph",
        "deepstack": 1,
        "notice": "seen",
    }


class Server:
    """What both protocols answer; refuses the first `refusals` calls."""

    def __init__(self, refusals: int = 0) -> None:
        self.refusals = refusals
        self.calls = 0

    def refuses(self) -> bool:
        self.calls += 1
        return self.calls <= self.refusals

    def http(self) -> FastAPI:
        app = FastAPI()

        @app.post("/v1/encode")
        async def encode(request: Request) -> Response:
            if self.refuses():
                body = json.dumps({"error": OVERLOADED})
                return Response(body, 429, {"retry-after": "0"})
            items, options = wire.parse_request(
                await request.body(), request.headers["content-type"]
            )
            answers = [answer(i, x.data or b"", options["dtype"]) for i, x in enumerate(items)]
            errors = [item["error"] for item in answers if "error" in item]
            if errors and options["on_error"] == "fail":
                return Response(json.dumps({"error": errors[0]}), 400)
            document = {"model": "m", "weights": "dummy", "items": answers, "timings": TIMINGS}
            packed = b"".join(write_safetensors(document, ""))
            return Response(packed, media_type=request.headers["accept"])

        @app.get("/v1/model")
        async def model(request: Request) -> dict[str, str | None]:
            return {"token": request.headers.get("authorization")}

        @app.get("/readyz")
        async def readyz() -> Response:
            return Response(json.dumps({"error": OVERLOADED}), 503 if self.refuses() else 200)

        return app


class Servicer:
    """The same over gRPC."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def Encode(self, request: Any, context: Any) -> Any:
        if self.server.refuses():
            details = json.dumps(OVERLOADED | {"retry_after_s": 0.01})
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, details)
        items = []
        for index, item in enumerate(request.items):
            one = answer(index, item.data, request.options.dtype)
            if "error" in one:
                if request.options.on_error == "fail":
                    context.abort(grpc.StatusCode.INVALID_ARGUMENT, json.dumps(one["error"]))
                one["error"] = pb.Error(**one["error"])
            items.append(pb.Embedding(**one))
        timings = pb.Timings(**TIMINGS)
        return pb.EncodeResponse(model="m", weights="dummy", items=items, timings=timings)

    def EncodeStream(self, request: Any, context: Any) -> Iterator[Any]:
        whole = self.Encode(request, context)
        for one in reversed(whole.items):
            part = pb.Embedding(index=one.index, data=one.data[1:])
            one.data = one.data[:1]
            yield pb.EncodeChunk(model=whole.model, weights=whole.weights, embedding=one)
            yield pb.EncodeChunk(embedding=part, last=True, timings=whole.timings)

    def Release(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    Plan = Fetch = GetPlace = Release

    def GetModel(self, request: Any, context: Any) -> Any:
        token = dict(context.invocation_metadata()).get("authorization")
        return pb.GetModelResponse(json=json.dumps({"token": token}))


@pytest.fixture(params=["http", "grpc"])
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def client(protocol: str, server: Server) -> Iterator[Client]:
    if protocol == "http":
        with in_a_thread(server.http()) as url, Client(url, token="secret") as client:
            yield client
        return
    with ThreadPoolExecutor(2) as pool:
        grpc_server = grpc.server(pool)
        add_EncoderServicer_to_server(Servicer(server), grpc_server)
        port = grpc_server.add_insecure_port("127.0.0.1:0")
        grpc_server.start()
        with Client(f"grpc://127.0.0.1:{port}", token="secret") as client:
            yield client
        grpc_server.stop(None).wait()


@pytest.mark.parametrize("ends", ["before its first item", "within an item", "after it came twice"])
def test_a_stream_without_each_item_once_is_no_response(server: Server, ends: str) -> None:
    class Wrong(Servicer):
        def EncodeStream(self, request: Any, context: Any) -> Iterator[Any]:
            first, last = super().EncodeStream(request, context)
            return iter(
                {
                    "before its first item": [],
                    "within an item": [first],
                    "after it came twice": [first, last, first, last],
                }[ends]
            )

    with ThreadPoolExecutor(2) as pool:
        grpc_server = grpc.server(pool)
        add_EncoderServicer_to_server(Wrong(server), grpc_server)
        port = grpc_server.add_insecure_port("127.0.0.1:0")
        grpc_server.start()
        with Client(f"grpc://127.0.0.1:{port}") as client, pytest.raises(ServiceError) as caught:
            client.encode([images.jpeg(64, 64)])
        grpc_server.stop(None).wait()
    assert caught.value.type == "invalid_response"


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_sources_and_dtypes(client: Client, tmp_path: Path, dtype: str) -> None:
    photo = images.photograph("rocket.jpg")
    path = tmp_path / "rocket.jpg"
    path.write_bytes(photo)
    sources: list[Source] = [photo, path, str(path), images.opened()]
    embeddings = client.encode(sources, dtype=dtype)
    assert [one.index for one in embeddings] == [0, 1, 2, 3]
    assert [one.digest for one in embeddings[:3]] == [str(len(photo))] * 3
    assert int(embeddings[3].digest) > 100_000, "an image travels as PNG"
    for one in embeddings:
        assert torch.equal(one.torch(), ROWS.to(DTYPES[dtype]))
        assert np.array_equal(one.numpy(), ROWS.to(DTYPES[dtype]).float().numpy())
        assert (one.grid_thw, one.tokens, one.shape) == ((1, 4, 4), 4, (4, 2))
        assert (one.source, one.deepstack, one.notice) == ("graph", 1, "seen")
        assert (one.model, one.weights, one.dtype) == ("m", "dummy", dtype)
        assert one.timings == TIMINGS
        assert dtype == "bfloat16" or not one.numpy().flags.writeable
    assert len(set(embeddings)) == 4


def test_rows_with_scales(client: Client) -> None:
    (one,) = client.encode([images.jpeg(64, 64)], dtype="float8_e4m3")
    expected = quantised(ROWS)
    assert (one.dtype, len(one.data), len(one.scales)) == ("float8_e4m3", 8, 16)
    assert one.data == octets(expected.values)
    assert np.array_equal(one.numpy(), expected.float().numpy())
    assert torch.equal(one.torch(), expected.float().bfloat16())


def test_errors(client: Client, protocol: str) -> None:
    with pytest.raises(ServiceError, match="no") as refused:
        client.encode([b"good", b"bad"])
    error = refused.value
    assert (error.type, error.item, error.retryable) == ("invalid_media", 1, False)
    assert error.status == (400 if protocol == "http" else "INVALID_ARGUMENT")
    good, bad = client.encode([b"good", b"bad"], on_error="return")
    assert isinstance(good, Embedding)
    assert isinstance(bad, ServiceError)
    assert (bad.type, bad.item, bad.status) == ("invalid_media", 1, None)


@pytest.mark.parametrize("source", ["photo.jpg", b"bytes", Path("photo.jpg"), 5])
def test_one_source_is_no_list(client: Client, server: Server, source: Any) -> None:
    with pytest.raises(TypeError, match="encode takes a list, not one "):
        client.encode(source)
    assert server.calls == 0


@pytest.mark.parametrize("source", [np.zeros((8, 8, 3), np.uint8), 5, None, bytearray(b"x")])
def test_what_is_no_source_says_what_sources_are(
    client: Client, server: Server, source: Any
) -> None:
    kind = type(source).__name__
    said = f"a source is a path, .*Video, Frames or Input, not {kind}: PIL.Image.fromarray"
    with pytest.raises(TypeError, match=said):
        client.encode([source])
    assert server.calls == 0


def test_values_that_cannot_be_sent(client: Client, server: Server) -> None:
    said = r"not sent: options\.max_pixels must be .* not 118059"
    with pytest.raises(ServiceError, match=said) as caught:
        client.encode([b"x"], max_pixels=2**70)
    assert caught.value.type == "invalid_option"
    with pytest.raises(ServiceError, match=r"not sent: items\[1\]\.max_pixels must be"):
        client.encode([b"x", Input(b"x", max_pixels={1})])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Frames are .*not URLs such as https://a/b\.png"):
        client.encode([Frames(["https://a/b.png"])])
    assert server.calls == 0


def test_a_token_that_is_missing_says_where_it_is_given() -> None:
    error = service_error({"type": "unauthorized", "message": "a token"}, 401)
    assert error.message == f"a token; {TOKEN}"
    assert "token=" in TOKEN
    assert "ENCODER_SERVICE_TOKEN" in TOKEN


def test_refusals_are_tried_again(client: Client, server: Server) -> None:
    server.refusals = 2
    assert len(client.encode([b"x"])) == 1
    assert server.calls == 3


def test_attempts_are_bounded(client: Client, server: Server, protocol: str) -> None:
    server.refusals = 100
    client.client.retries = 2
    with pytest.raises(ServiceError) as refused:
        client.encode([b"x"])
    assert server.calls == 3
    assert (refused.value.type, refused.value.retryable) == ("overloaded", True)
    assert refused.value.status == (429 if protocol == "http" else "RESOURCE_EXHAUSTED")
    client.client.timeout_seconds = 0
    with pytest.raises(ServiceError):
        client.encode([b"x"])
    assert server.calls == 4


def test_the_token_travels(client: Client) -> None:
    assert client.model() == {"token": "Bearer secret"}


def test_readiness_over_http() -> None:
    async def ask() -> list[bool]:
        async with listening(Server(1).http()) as url, AsyncClient(url) as client:
            return [await client.ready(), await client.ready()]

    assert asyncio.run(ask()) == [False, True]


def test_a_proxy_without_the_service_is_not_ready() -> None:
    async def ask() -> bool:
        async with listening(FastAPI()) as url, AsyncClient(url) as client:
            with pytest.raises(ServiceError, match="404"):
                await client.encode([b"x"])
            return await client.ready()

    assert not asyncio.run(ask())


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_nobody_there(scheme: str) -> None:
    with Client(f"{scheme}://127.0.0.1:9", retries=0, timeout_seconds=5) as client:
        assert not client.ready()
        with pytest.raises(ServiceError) as refused:
            client.encode([b"x"])
    assert (refused.value.type, refused.value.retryable) == ("unavailable", True)


def waiting(began: threading.Event) -> FastAPI:
    """Never answers b"wait"."""
    app = Server().http()

    @app.middleware("http")
    async def wait(request: Request, proceed: Any) -> Response:
        if b"wait" in await request.body():
            began.set()
            while not await request.is_disconnected():
                await asyncio.sleep(0.02)
        found: Response = await proceed(request)
        return found

    return app


def test_closing_ends_the_calls_of_other_threads() -> None:
    began = threading.Event()
    with in_a_thread(waiting(began)) as url, ThreadPoolExecutor(1) as pool:
        client = Client(url)
        call = pool.submit(client.encode, [b"wait"])
        assert began.wait(60)
        client.close()
        with pytest.raises(RuntimeError, match="closed before the call was complete"):
            call.result(20)
        client.close()
        with pytest.raises(RuntimeError, match="the client is closed"):
            client.ready()


def test_closing_waits_until_what_is_finished_of_a_dataset_is_written(tmp_path: Path) -> None:
    began, out = threading.Event(), tmp_path / "out"
    for name in ("a", "b", "wait"):
        (tmp_path / f"{name}.jpg").write_text(name)
    with in_a_thread(waiting(began)) as url, ThreadPoolExecutor(1) as pool:
        client = Client(url)
        options = DatasetOptions("float32", concurrency=1)
        call = pool.submit(client.encode_dataset, tmp_path, out, options)
        assert began.wait(60)
        client.close()
        lines = (out / "manifest.jsonl").read_text().splitlines()
        with pytest.raises(RuntimeError, match="closed before"):
            call.result(20)
    assert [Path(one["name"]).name for one in json.loads(lines[1])["items"]] == ["a.jpg", "b.jpg"]


@pytest.mark.parametrize("protocol", ["http"], indirect=True)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda items: items[:1], "1 items, not 2"),
        (lambda items: [*items, items[0]], "3 items, not 2"),
        (lambda items: [items[0] | {"data": b""}, items[1]], "item 0 has 0 bytes, not 16"),
    ],
)
def test_a_response_that_lacks_something_is_no_response(
    client: Client, monkeypatch: pytest.MonkeyPatch, change: Any, message: str
) -> None:
    responds(client, monkeypatch, change)
    with pytest.raises(ServiceError, match=message) as caught:
        client.encode([b"x", b"y"])
    assert caught.value.type == "invalid_response"


@pytest.mark.parametrize("protocol", ["http"], indirect=True)
def test_a_newer_service_may_say_more(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    responds(client, monkeypatch, lambda items: [one | {"hue": "red"} for one in items])
    assert [one.index for one in client.encode([b"x", b"y"])] == [0, 1]


def responds(client: Client, monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """With other items than the server's."""
    there = client.client.transport.encode

    async def encode(items: list[wire.RequestItem], options: dict[str, Any]) -> dict[str, Any]:
        document = await there(items, options)
        return document | {"items": change(document["items"])}

    monkeypatch.setattr(client.client.transport, "encode", encode)


def test_unknown_schemes() -> None:
    with pytest.raises(ValueError, match="must be http, https, grpc or grpcs"):
        Client("ftp://127.0.0.1")


def test_the_package_offers_the_client_and_loads_nothing_heavy() -> None:
    assert encoder_service.Client is Client
    assert {"Client", "Frames", "__version__"} <= set(dir(encoder_service))
    with pytest.raises(AttributeError, match="nothing"):
        encoder_service.nothing  # noqa: B018
    code = "import sys, encoder_service; encoder_service.Client; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"torch", "ray", "router", "actors"} & set(loaded)


def test_what_is_no_id_and_no_source_says_so() -> None:
    transport = HttpTransport("http://test", None, 5)
    with pytest.raises(TypeError, match="reference"):
        asyncio.run(transport.fetch(cast(str, object())))
    with pytest.raises(ValueError, match="empty"):
        asyncio.run(transport.fetch(""))
    with pytest.raises(OSError, match="only https"):
        request_item("http://example.com/x.jpg")


def test_a_client_that_is_never_closed_ends_quietly() -> None:
    code = "import sys; from encoder_service import Client; Client(sys.argv[1]).model()"
    with in_a_thread(Server().http()) as url:
        ended = subprocess.run([sys.executable, "-c", code, url], capture_output=True, check=True)
    assert (ended.stdout, ended.stderr) == (b"", b"")
