"""What stands around a proxy in tests: the service in this process, a vLLM stand-in, a client."""

from __future__ import annotations

import asyncio
import json
import threading
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from actors.families.registry import read
from actors.options import ReferenceOptions
from actors.types import Answer, Dtype, Media
from encoder_service.api.http import build as build_service
from encoder_service.client import AsyncClient
from encoder_service.commands.proxy import server
from encoder_service.config import AuthOptions, LimitOptions, ServiceOptions
from encoder_service.engines.openai_proxy import Proxy
from encoder_service.service import Service
from tests.unit.front_door import MODEL, Fleet, service, zeros

WIDTH = 192


class Distinct(Fleet):
    """Rows that tell the images apart."""

    async def encode(
        self, media: list[Media], dtype: Dtype, timeout_seconds: float, **_: Any
    ) -> list[Answer]:
        await super().encode(media, dtype, timeout_seconds, reference=False)
        return [replace(zeros(one), data=rows(one)) for one in media]


def rows(media: Media) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The image's digest, over and over."""
    digest = np.frombuffer(bytes.fromhex(media.digest), np.uint8)
    return np.resize(digest, media.plan.tokens * WIDTH * 2)


class Vllm:
    """Reads embeddings as vLLM does, and says what it got."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.bodies: list[bytes] = []
        self.go_on = asyncio.Event()
        self.ended = asyncio.Event()

    async def chat(self, request: Request) -> Response:
        self.requests.append(request)
        self.bodies.append(await request.body())
        body = json.loads(self.bodies[-1])
        if body.get("model") == "missing":
            return JSONResponse({"error": {"message": "no such model", "code": 404}}, 404)
        if body.get("slow"):
            while not await request.is_disconnected():
                await asyncio.sleep(0.01)
            self.ended.set()
        if body.get("stream"):
            pieces = self.pieces(fails=body.get("model") == "failing")
            return StreamingResponse(pieces, media_type="text/event-stream")
        return JSONResponse({"id": "1", "choices": []}, headers={"x-request-id": "abc"})

    async def pieces(self, *, fails: bool) -> AsyncIterator[bytes]:
        try:
            yield b"data: 1\n\n"
            await self.go_on.wait()
            if fails:
                raise ConnectionError
            yield b"data: [DONE]\n\n"
        finally:
            self.ended.set()

    async def other(self, request: Request) -> Response:
        self.requests.append(request)
        return JSONResponse({"path": request.scope["raw_path"].decode(), "q": request.url.query})

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/{path:path}", self.other),
            ]
        )


@asynccontextmanager
async def listening(app: Starlette) -> AsyncIterator[str]:
    """Its URL, on a port of its own. As `Server.serve`, whose end takes two tenths of a second."""
    serving = server(app, host="127.0.0.1", port=0, log_level="error")
    serving.config.load()
    serving.lifespan = serving.config.lifespan_class(serving.config)
    await serving.startup()
    await serving.on_tick(0)  # headers of all answers
    state = serving.server_state
    try:
        yield f"http://127.0.0.1:{serving.servers[0].sockets[0].getsockname()[1]}"
    finally:
        serving.servers[0].close()
        for connection in list(state.connections):
            connection.shutdown()
        async with asyncio.timeout(10):
            while state.connections or state.tasks:
                await asyncio.sleep(0.005)
        await serving.lifespan.shutdown()


@contextmanager
def in_a_thread(app: Starlette) -> Iterator[str]:
    """The same for tests without an event loop."""
    ready, end, found = threading.Event(), threading.Event(), list[str]()

    async def serve() -> None:
        async with listening(app) as address:
            found.append(address)
            ready.set()
            await asyncio.to_thread(end.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(60)
    try:
        yield found[0]
    finally:
        end.set()
        thread.join(60)


Story = Callable[[httpx.AsyncClient, Vllm], Awaitable[None]]


def told(
    story: Story,
    fleet: Fleet | None = None,
    upstream: str = "",
    digests: tuple[str, ...] = (),
    by_id: bool = False,
    ttl_seconds: float = 600,
    **limits: Any,
) -> None:
    """Runs a story with a client of the proxy and the server behind it."""

    async def run() -> None:
        references = ReferenceOptions(ttl_seconds=ttl_seconds)
        options = ServiceOptions(model=MODEL, references=references)
        encoders = Service(options, read(MODEL), fleet or Distinct())
        vllm, app = Vllm(), build_service(encoders)
        async with AsyncExitStack() as stack:
            encoder = AsyncClient(await stack.enter_async_context(listening(app)), retries=0)
            behind = await stack.enter_async_context(listening(vllm.app()))
            auth = AuthOptions(token_sha256=digests)
            limit = LimitOptions(**limits)
            proxy = Proxy(upstream or behind, limit, auth, encoder, by_id=by_id)
            front = await stack.enter_async_context(listening(proxy.app()))
            client = httpx.AsyncClient(base_url=front, timeout=60)
            await story(await stack.enter_async_context(client), vllm)

    asyncio.run(asyncio.wait_for(run(), 100))


def image(file: bytes) -> dict[str, Any]:
    url = f"data:image/jpeg;base64,{b64encode(file).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def chat(*parts: Any, **more: Any) -> dict[str, Any]:
    turn = {"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}
    return {"model": "m", "messages": [{"role": "system", "content": "Be brief."}, turn]} | more


def another_service() -> Starlette:
    """That encodes as the one behind the proxy."""
    return build_service(service(Distinct()))
