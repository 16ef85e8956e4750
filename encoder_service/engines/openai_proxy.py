"""In front of a vLLM server: images of chat requests become embeddings, all else passes unchanged.

A client speaks OpenAI's API to it, with its own key, which goes to the server as it is; the proxy
checks it only if it is told to, and before it encodes anything. vLLM then runs without its vision
tower (docs/engines.md). Knows nothing of Ray, nor of torch's towers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass

import httpx
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from actors.errors import DeadlineExceeded, InvalidRequest, TooLarge, Unavailable
from encoder_service.api import envelope
from encoder_service.api.auth import Tokens
from encoder_service.api.envelope import request_id_of
from encoder_service.api.errors import TABLE, Fault, fault
from encoder_service.api.upload import read_body
from encoder_service.client import embedding
from encoder_service.client.async_ import AsyncClient
from encoder_service.config import AuthOptions, LimitOptions
from encoder_service.engines.chat_images import place, places, refuse_ready_made
from encoder_service.intake.limits import Buffered
from encoder_service.wire.formats import WireError, read_json

CHAT_PATH = "/v1/chat/completions"
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
OF_A_CONNECTION = frozenset(
    (
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization",
        "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade",
        "host", "content-length", "expect",
    )
)  # fmt: skip
"""Headers that belong to one connection, RFC 9110 section 7.6.1, and what httpx sets itself."""


@dataclass(frozen=True, slots=True)
class ProxyOptions:
    """Where the two servers are."""

    upstream: str
    """URL of the vLLM server, without /v1."""
    limits: LimitOptions
    """Of bodies; timeout_seconds is how long a body, and the embeddings, may take."""
    auth: AuthOptions
    """Of clients, whose header goes on to vLLM all the same. Empty: everybody may."""
    upstream_timeout_seconds: float = 600
    """Between two pieces of an answer."""


class Relayed(StreamingResponse):
    """The server's answer as it comes; whoever hangs up first, the connection is given back."""

    def __init__(self, answer: httpx.Response) -> None:
        super().__init__(answer.aiter_raw(), answer.status_code)
        self.answer = answer
        self.raw_headers = [
            (name.lower(), value)
            for name, value in answer.headers.raw
            if name.decode().lower() not in OF_A_CONNECTION or name.lower() == b"content-length"
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.answer.aclose()


class Proxy:
    """One encoder service, one vLLM server, and the connections to both."""

    def __init__(
        self,
        options: ProxyOptions,
        encoder: AsyncClient,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.options = options
        self.encoder = encoder
        self.tokens = Tokens(options.auth)
        self.buffered = Buffered(options.limits.max_buffered_bytes)
        self.client = httpx.AsyncClient(
            base_url=options.upstream,
            timeout=httpx.Timeout(options.upstream_timeout_seconds, connect=10),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
            transport=transport,
        )

    async def answer(self, request: Request) -> Response:
        """Whatever is asked."""
        try:
            if request.method != "OPTIONS":  # a browser sends it no key, nor does vLLM ask for one
                self.tokens.authorize(request.headers.get("authorization"))
            with ExitStack() as held:
                take = held.enter_context(self.buffered.hold())
                body = await read_body(request, self.options.limits, take)
                if request.method == "POST" and request.scope["path"] == CHAT_PATH:
                    body = await self.with_embeddings(body)
                else:
                    await asyncio.to_thread(check_other, body)
                return Relayed(await self.send(request, body))
        except ClientDisconnect:
            return Response(status_code=499)  # there is nobody to read it
        except Exception as problem:
            return refusal(problem, request_id_of(request.headers.get("x-request-id")))

    async def with_embeddings(self, body: bytes) -> bytes:
        """The request as vLLM gets it; one without images as it came."""
        try:
            document = await asyncio.to_thread(read_json, body)
        except WireError as error:
            raise InvalidRequest(str(error)) from None
        await asyncio.to_thread(refuse_ready_made, document)
        found = await asyncio.to_thread(places, document)
        if not found:
            return body
        most = self.options.limits.max_items
        if len(found) > most:
            raise TooLarge(f"{len(found)} images in one request: at most {most}")
        try:
            embeddings = await self.encoder.encode([one.source for one in found])
        except embedding.ServiceError as problem:
            if problem.item is not None:
                problem.message = f"{found[problem.item].where}: {problem.message}"
            raise

        def written() -> bytes:
            place(found, embeddings)
            return json.dumps(document).encode()

        return await asyncio.to_thread(written)

    async def send(self, request: Request, body: bytes) -> httpx.Response:
        """The server's answer, its body still to come. Raises Unavailable, DeadlineExceeded."""
        named = request.headers.get("connection", "").lower().split(",")
        dropped = OF_A_CONNECTION.union(map(str.strip, named))
        headers = [(k, v) for k, v in request.headers.raw if k.decode("latin-1") not in dropped]
        if "accept-encoding" not in request.headers:
            headers.append((b"accept-encoding", b"identity"))  # or httpx would ask for its own
        outgoing = self.client.build_request(
            request.method, self.target(request), content=body, headers=headers
        )
        try:
            return await self.client.send(outgoing, stream=True)
        except httpx.TimeoutException as error:
            raise DeadlineExceeded(f"no answer of {self.options.upstream}: {error!r}") from None
        except httpx.TransportError as error:
            raise Unavailable(f"{self.options.upstream} cannot be reached: {error!r}") from None

    def target(self, request: Request) -> httpx.URL:
        """The same path and query, still quoted, on the server, whatever they are."""
        path: bytes = request.scope.get("raw_path") or request.url.path.encode()
        query: bytes = request.scope["query_string"]
        base = self.client.base_url
        whole = base.raw_path.rstrip(b"/") + path + (b"?" + query if query else b"")
        return base.copy_with(raw_path=whole)

    async def close(self) -> None:
        """Gives the connections back."""
        await self.client.aclose()
        await self.encoder.close()


def check_other(body: bytes) -> None:
    """Of any path but the chat's. Raises InvalidRequest for ready-made embeddings."""
    try:
        document = json.loads(body)
    except ValueError:
        return  # a form, or nothing: vLLM reads embeddings from JSON alone
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    refuse_ready_made(document)


def refusal(problem: Exception, request_id: str) -> Response:
    """An error in OpenAI's shape."""
    found = of_encoder(problem) if isinstance(problem, embedding.ServiceError) else None
    found = found or fault(problem, request_id)
    return envelope.response(found, found.openai_document())


def of_encoder(problem: embedding.ServiceError) -> Fault | None:
    """The encoder service's own error; None where the proxy, not its client, is at fault."""
    row = next((row for row in TABLE.values() if row.type == problem.type), None)
    if row is None or row.type in ("unauthorized", "invalid_option", "not_found"):
        return None
    return Fault(row, problem.message, problem.item, problem.retry_after_seconds)


def build(proxy: Proxy) -> Starlette:
    """The application; it closes the proxy's connections when it ends."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await proxy.close()

    routes = [Route("/{path:path}", proxy.answer, methods=METHODS)]
    return Starlette(routes=routes, lifespan=lifespan)
