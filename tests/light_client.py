"""Checks the light client. Run by .ci/run where only the wheel of packages/client is installed.

Calls a fake service over HTTP and gRPC, and checks that neither torch nor Ray is installed. Imports
no other test module, because those need more packages.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import numpy as np
from aiohttp import web
from PIL import Image

import encoder_service
from encoder_service import Client, Embedding, ServiceError
from encoder_service.client import DatasetOptions
from encoder_service.engines import sglang, vllm
from encoder_service.wire import encoder_pb2 as pb
from encoder_service.wire.documents import RequestItem, parse_request
from encoder_service.wire.encoder_grpc import add_EncoderServicer_to_server
from encoder_service.wire.formats import SAFETENSORS, write_safetensors

ABSENT = ("torch", "ray", "router", "actors.encoder", "fastapi", "httpx")
"""Of `actors`, the client has only the reader of rows, for the connector in vLLM."""
ROWS = np.arange(800_000, dtype=np.float16).reshape(200_000, 4)
"""Larger than a megabyte."""


def item(index: int, sent: RequestItem) -> dict[str, Any]:
    """An item of a response; an error for the data b"text"."""
    assert sent.data
    if sent.data == b"text":
        error = {"type": "unsupported_media", "message": "no", "item": index, "retryable": False}
        return {"index": index, "type": sent.type, "error": error}
    return {
        "index": index,
        "type": sent.type,
        "grid_thw": [1, 2, 2],
        "tokens": ROWS.shape[0],
        "dtype": "float16",
        "shape": list(ROWS.shape),
        "data": ROWS.tobytes(),
        "digest": f"{len(sent.data):x}",
        "source": "graph",
        "deepstack": 0,
    }


MODEL: dict[str, Any] = {"model": "m", "family": "qwen3_vl", "weights": "dummy"}


async def encode(request: web.Request) -> web.Response:
    items, _ = parse_request(await request.read(), request.headers["content-type"])
    answers = [item(index, one) for index, one in enumerate(items)]
    failed = next((one["error"] for one in answers if "error" in one), None)
    if failed:
        return web.json_response({"error": failed}, status=415)
    assert request.headers["accept"] == SAFETENSORS
    document = MODEL | {"items": answers, "timings": {"total_ms": 1.0}}
    body = b"".join(write_safetensors(document, ""))
    return web.Response(body=body, content_type=SAFETENSORS)


async def model(request: web.Request) -> web.Response:
    return web.json_response(MODEL)


class Servicer:
    """The methods that the client calls here; the rest are only registered."""

    async def Encode(self, request: Any, context: Any) -> Any:
        items = [RequestItem(one.type, one.data) for one in request.items]
        embeddings = [pb.Embedding(**item(index, one)) for index, one in enumerate(items)]
        return pb.EncodeResponse(**MODEL, items=embeddings, timings=pb.Timings(total_ms=1))

    async def EncodeStream(self, request: Any, context: Any) -> AsyncIterator[Any]:
        whole = await self.Encode(request, context)
        for one in whole.items:
            yield pb.EncodeChunk(**MODEL, embedding=one, last=True, timings=whole.timings)

    async def Fetch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        document = item(0, RequestItem("image", b"kept"))
        data = document.pop("data")
        yield pb.EncodeChunk(**MODEL, embedding=pb.Embedding(**document, data=data[:100]))
        yield pb.EncodeChunk(embedding=pb.Embedding(index=0, data=data[100:]), last=True)

    Plan = GetPlace = Release = GetModel = Encode


@contextmanager
def service() -> Iterator[list[str]]:
    ready, end = threading.Event(), threading.Event()
    urls: list[str] = []

    async def serve() -> None:
        app = web.Application()
        app.add_routes([web.post("/v1/encode", encode), web.get("/v1/model", model)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server = grpc.aio.server()
        add_EncoderServicer_to_server(Servicer(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        urls.extend((f"http://127.0.0.1:{runner.addresses[0][1]}", f"grpc://127.0.0.1:{port}"))
        ready.set()
        await asyncio.to_thread(end.wait)
        await server.stop(None)
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(20)
    try:
        yield urls
    finally:
        end.set()
        thread.join()


def refused(client: Client) -> ServiceError | None:
    try:
        client.encode([b"text"])
    except ServiceError as error:
        return error
    return None


def check(url: str) -> None:
    with Client(url) as client:
        embeddings = client.encode([b"GIF89a", Image.new("RGB", (8, 8))], dtype="float16")
        for position, one in enumerate(embeddings):
            assert isinstance(one, Embedding)
            assert np.array_equal(one.numpy(), ROWS)
            assert (one.index, one.family, one.weights) == (position, "qwen3_vl", "dummy")
        if url.startswith("grpc"):
            assert np.array_equal(client.fetch("r.1").numpy(), ROWS)
            return
        assert not client.ready(), "the stand-in has no /readyz"
        error = refused(client)
        assert error is not None
        assert (error.type, error.status) == ("unsupported_media", 415)
        with TemporaryDirectory() as folder:
            (photo := Path(folder) / "photo.png").write_bytes(b"a photo")
            options = DatasetOptions(dtype="float16")
            written = client.encode_dataset([photo], Path(folder) / "out", options)
            assert (written.encoded, written.failed) == (1, 0)


def main() -> None:
    found = [name for name in ABSENT if find_spec(name)]
    assert not found, f"{found} came with the client"
    assert "site-packages" in encoder_service.__file__, encoder_service.__file__
    assert callable(vllm.content_part)
    assert callable(sglang.processor_output)
    with service() as urls:
        for url in urls:
            check(url)
    assert not set(ABSENT) & set(sys.modules)
    print("client wheel: 1 passed, 0 failed")


if __name__ == "__main__":
    main()
