"""The API over HTTP: a FastAPI application around one Service."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import DEFAULT_EXCLUDED_CONTENT_TYPES, GZipMiddleware
from starlette.routing import Match
from starlette.types import Lifespan, Receive, Scope, Send

from actors.errors import InvalidOption, NotAcceptable
from encoder_service.api import schema
from encoder_service.api.errors import Envelope, Fault, error_response, own_path, row_of_status
from encoder_service.api.upload import check_length, read
from encoder_service.intake.limits import INLINE_BYTES, Take, offload
from encoder_service.ops.status import CONTENT_TYPE, merge, page, policy
from encoder_service.service import Service
from encoder_service.wire.documents import RequestItem, is_file
from encoder_service.wire.formats import JSON, MSGPACK, NPZ, SAFETENSORS, WRITERS, Document, Piece

ENCODE_PATH = "/v1/encode"
PLAN_PATH = "/v1/plan"
CHAT_PATH = "/v1/chat/completions"
MODELS_PATH = "/v1/models"
EMBEDDINGS_PATH = "/v1/embeddings"
REFERENCE_PATH = "/v1/embeddings/{reference}"
PLACE_PATH = "/v1/embeddings/{reference}/place"
COUNTED = {
    ENCODE_PATH: "http",
    PLAN_PATH: "plan",
    CHAT_PATH: "chat",
    EMBEDDINGS_PATH: "embeddings",
}
"""The paths that the metrics count, with the `api` label of each."""
PLAN_FORMATS = (JSON, MSGPACK)
GZIP_LEVEL = 1  # base64 shrinks by a quarter at any level


async def http_exception(request: Request, error: HTTPException) -> Response:
    """Handles the framework's own errors: unknown routes, methods that are not allowed."""
    row, path, detail = row_of_status(error.status_code), request.url.path, error.detail
    headers = dict(error.headers or {})
    if error.status_code == 404:
        detail = "no such path: /docs lists those of this service"
        chats = any(getattr(one, "path", "") == CHAT_PATH for one in request.app.routes)
        wanted = f"{own_path(request.scope)}/"
        if not chats and wanted.startswith((f"{CHAT_PATH}/", f"{MODELS_PATH}/")):
            detail = "this service has no language model: set `llm` in its configuration"
    elif error.status_code == 405:
        # The framework lists only the methods of the path's first route.
        routes = (one for one in request.app.routes if one.matches(request.scope)[0] != Match.NONE)
        allowed = {method for one in routes for method in getattr(one, "methods", None) or ()}
        if allowed:
            headers["allow"] = ", ".join(sorted(allowed))
            detail = f"this path takes {headers['allow']}"
    answer = error_response(Fault(row, f"{request.method} {path}: {detail}"))
    answer.headers.update(headers)
    return answer


def build(service: Service, lifespan: Lifespan[FastAPI] | None = None) -> FastAPI:
    """Builds the application. llm/embeddings.py adds OpenAI's embeddings API, and llm/http.py chat
    completions if there is a language model."""
    app = FastAPIOffline(
        title="Encoder Service",
        description="The encoders of vision-language and audio models as a separate service. "
        "Images, videos or sounds in, embeddings out, with rows in the order of the model's own "
        "processor.",
        version=service.card["versions"]["encoder-service"],
        redoc_url=None,
        lifespan=lifespan,
        exception_handlers={HTTPException: http_exception},
    )
    # Not compressed, because rows hardly shrink and are sent from shared memory.
    unpacked = (*DEFAULT_EXCLUDED_CONTENT_TYPES, MSGPACK, SAFETENSORS, NPZ)
    app.add_middleware(GZipMiddleware, compresslevel=GZIP_LEVEL, exclude_content_types=unpacked)
    app.add_middleware(Envelope, observer=service.observer, counted=COUNTED, unsent=service.unsent)
    # Routes without `authorize` serve probes, scrapers and browsers, which send no token. They show
    # nothing of any request's content.

    @app.post(
        ENCODE_PATH,
        responses=schema.ERRORS | schema.ANSWER,
        openapi_extra=schema.ENCODE,
        response_class=Response,
    )
    async def encode(request: Request) -> Response:
        """Embeddings of images, videos and sounds, in the order of the request."""
        accept = check_head(request, default_of(request), WRITERS)
        service.backend.check_room()  # 413 before 429: retrying would not help
        service.unsent.check_room(1)
        with service.buffered.hold() as take:
            items, options = await read_items(request, take)
            widened = "dtype" not in options.model_fields_set if accept == JSON else accept == NPZ
            if widened and options.dtype == "bfloat16" and not options.reference:
                # Many languages that read JSON have no bfloat16, and neither has numpy.
                options = options.model_copy(update={"dtype": "float32"})
            if options.encoding and accept != JSON:
                raise InvalidOption(f"options.encoding: only with `Accept: {JSON}`, not {accept}")
            if options.dtype == "float8_e4m3" and (accept == NPZ or options.encoding == "float"):
                raise InvalidOption(
                    "options.dtype: float8_e4m3 saves nothing in npz and lists of numbers: ask for "
                    "float32, or for another format"
                )
            document = await service.encode(items, options, request.state.exchange, take)
        return await rendered(request, document, accept, options.encoding or "base64")

    @app.post(
        PLAN_PATH,
        responses=schema.ERRORS | schema.PLANS,
        openapi_extra=schema.ENCODE,
        response_class=Response,
    )
    async def plan(request: Request) -> Response:
        """What images, videos and sounds would cost, from their headers alone. Needs no encoder.

        The request is the same as for /v1/encode. Options that only concern the embeddings have no
        effect.
        """
        accept = check_head(request, JSON, PLAN_FORMATS)
        with service.buffered.hold() as take:
            items, options = await read_items(request, take)
            document = await service.plan(items, options, request.state.exchange, take)
        return await rendered(request, document, accept)

    def check_head(request: Request, default: str, formats: Collection[str]) -> str:
        """Checks a request before its body is read. Returns the content type of the response."""
        service.authorize(*request.headers.getlist("authorization"))
        content_type = request.headers.get("content-type", "")
        if request.query_params and not is_file(content_type):
            raise InvalidOption(
                "options belong in the body's `options`: only a bare file has them in the query, "
                f"with a content type such as image/jpeg, not {content_type[:100]!r}"
            )
        if len(request.query_params.multi_items()) > len(request.query_params):
            raise InvalidOption("the query has an option twice: give each once")
        accept = choose(request.headers.get("accept", ""), default, formats)
        check_length(request, service.limits)
        return accept

    async def read_items(
        request: Request, take: Take
    ) -> tuple[list[RequestItem], schema.RequestOptions]:
        items, values = await read(request, service.limits, take)
        query = dict(request.query_params)
        return items, schema.request_options(query or values, strings=bool(query))

    @app.get(REFERENCE_PATH, responses=schema.MISSING | schema.ANSWER, response_class=Response)
    async def fetch(request: Request, reference: str) -> Response:
        """The embedding kept under an id, as a response with one item."""
        service.authorize(*request.headers.getlist("authorization"))
        accept = choose(request.headers.get("accept", ""))
        document = await service.fetch(reference, request.state.exchange.request_id)
        return await rendered(request, document, accept)

    @app.delete(REFERENCE_PATH, responses=schema.MISSING, status_code=204)
    async def release(request: Request, reference: str) -> None:
        """Releases a kept embedding before it expires."""
        service.authorize(*request.headers.getlist("authorization"))
        await service.release(reference)

    @app.get(PLACE_PATH, responses=schema.MISSING)
    async def place(request: Request, reference: str) -> schema.PlaceDocument:
        """Where the replica that keeps an id serves its rows, for callers inside the cluster's
        network. Does not say whether the id is kept."""
        service.authorize(*request.headers.getlist("authorization"))
        return schema.PlaceDocument(**asdict(await service.place(reference)))

    @app.get("/v1/model", responses=schema.ERRORS)
    async def model(request: Request) -> dict[str, Any]:
        """What is served: the model, its budgets, limits and versions."""
        service.authorize(*request.headers.getlist("authorization"))
        return service.model()

    @app.get("/v1/status", responses=schema.ERRORS)
    async def status(request: Request) -> dict[str, Any]:
        """The fleet at a glance: totals since the replicas started, about a second old."""
        service.authorize(*request.headers.getlist("authorization"))
        return await service.status.get()

    @app.head("/", include_in_schema=False)
    @app.get("/", response_class=HTMLResponse, openapi_extra=schema.OPEN)
    async def status_page() -> HTMLResponse:
        """The status as a page. It asks for the token in the browser if one is required."""
        headers = {"content-security-policy": policy(), "cache-control": "no-cache"}
        return HTMLResponse(page(), headers=headers)

    @app.head("/healthz", include_in_schema=False)
    @app.get("/healthz", openapi_extra=schema.OPEN)
    async def healthz() -> dict[str, str]:
        """The process is alive."""
        return {"status": "ok"}

    @app.head("/readyz", include_in_schema=False)
    @app.get("/readyz", responses={503: schema.ERRORS[503]}, openapi_extra=schema.OPEN)
    async def readyz() -> dict[str, int]:
        """How many replicas are ready: weights loaded, every path captured. 503 if none is."""
        return {name: await count() for name, count in service.ready.items()}

    @app.get("/metrics", response_class=Response, openapi_extra=schema.OPEN)
    async def metrics() -> Response:
        """The series of all replicas, so that Prometheus scrapes one address, not each replica."""
        text = await asyncio.to_thread(merge, await service.scrape.get())
        return Response(text, headers={"content-type": CONTENT_TYPE})

    schema.describe(app, closed=service.tokens.required)
    return app


def default_of(request: Request) -> str:
    """The format for callers that accept any: JSON if the request is JSON, otherwise msgpack."""
    content_type = request.headers.get("content-type", "")
    return JSON if content_type.split(";")[0].strip().lower() == JSON else MSGPACK


def choose(accept: str, default: str = MSGPACK, available: Collection[str] = tuple(WRITERS)) -> str:
    """The content type that an Accept header prefers: by q, then exactness, then order.

    Wildcards prefer `default`. Raises NotAcceptable, before any work is done.
    """
    available = dict.fromkeys((default, *available))
    offers: list[tuple[tuple[float, int, int], str]] = []
    for position, entry in enumerate((accept.strip() or "*/*").split(",")):
        wanted, *parameters = (part.strip().lower() for part in entry.split(";"))
        quality = next((p[2:] for p in parameters if p.startswith("q=")), "1")
        try:
            weight = float(quality)
        except ValueError:
            raise NotAcceptable(f"Accept: q={quality!r} is not a number") from None
        found = next((one for one in available if wanted in ("*/*", "application/*", one)), None)
        if found and weight > 0:
            offers.append(((weight, 2 - wanted.count("*"), -position), found))
    if not offers:
        raise NotAcceptable(
            f"Accept: {accept!r} is not available; available are {', '.join(available)}"
        )
    return max(offers)[1]


async def rendered(
    request: Request, document: Document, accept: str, encoding: str = "base64"
) -> Response:
    """The document as a response. Formats that copy the data are written in a thread.

    Raises Overloaded (429) if too many bytes already wait to be sent.
    """
    size_bytes = sum(len(one.get("data", b"")) for one in document["items"])
    copied_bytes = size_bytes if accept in (JSON, NPZ) else 0
    write = partial(WRITERS[accept], document, encoding)
    return await written(request, accept, copied_bytes, write)


async def written(
    request: Request, accept: str, copied_bytes: int, write: Callable[[], Sequence[Piece]]
) -> Response:
    """The result of `write` as a response. Calls it in a thread if it copies much. Raises
    Overloaded."""
    take: Take = request.state.unsent
    take(copied_bytes)
    pieces = await offload(copied_bytes, write)
    take(held_bytes(pieces) - copied_bytes)
    if accept == JSON and copied_bytes > INLINE_BYTES and takes_gzip(request):
        # Here, because the middleware would block the event loop while it compresses.
        body = await asyncio.to_thread(gzip.compress, b"".join(pieces), GZIP_LEVEL)
        packed = {"content-encoding": "gzip", "vary": "Accept-Encoding"}
        return Response(body, media_type=accept, headers=packed)
    return await response(pieces, accept)


def takes_gzip(request: Request) -> bool:
    """Decides as GZipMiddleware does."""
    return "gzip" in request.headers.get("accept-encoding", "")


def held_bytes(pieces: Sequence[Piece]) -> int:
    """The memory that a body needs until it has been sent. Rows that occur twice count once."""
    large = {place(piece): len(piece) for piece in pieces if len(piece) > INLINE_BYTES}
    return sum(large.values()) + sum(len(one) for one in pieces if len(one) <= INLINE_BYTES)


def place(piece: Piece) -> tuple[int, int]:
    """Address and length."""
    found: int = np.frombuffer(piece, np.uint8).ctypes.data
    return found, len(piece)


async def response(pieces: Sequence[Piece], media_type: str) -> Response:
    """On uvloop, which Ray's actors run, rows are sent directly from shared memory.

    Copying 3.3 MB in a thread takes as much CPU time as sending them. asyncio's own loop accepts
    only bytes.
    """
    if type(asyncio.get_running_loop()).__module__.startswith("uvloop"):
        return InPieces(pieces, media_type)
    length = sum(len(piece) for piece in pieces)
    return Response(await offload(length, b"".join, pieces), media_type=media_type)


class InPieces(Response):
    """Sends the pieces one after another, each as soon as the connection has room for it."""

    def __init__(self, pieces: Sequence[Piece], media_type: str) -> None:
        length = sum(len(piece) for piece in pieces)
        super().__init__(headers={"content-length": str(length)}, media_type=media_type)
        self.pieces = gathered(pieces)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, headers = self.status_code, self.raw_headers
        await send({"type": "http.response.start", "status": status, "headers": headers})
        *pieces, last = self.pieces
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": last})


class BodyView(np.ndarray[Any, np.dtype[np.uint8]]):
    """A buffer [length] as an ASGI body, not copied. Serve's Python proxy pickles it as bytes."""

    def __bool__(self) -> bool:
        return self.size > 0

    def __reduce__(self) -> tuple[type[bytes], tuple[bytes]]:
        return bytes, (self.tobytes(),)


def gathered(pieces: Sequence[Piece]) -> list[bytes | BodyView]:
    """The same body with small pieces joined. Pieces of the same memory become one view, which
    pickle writes once."""
    found: list[bytes | BodyView] = []
    small: list[Piece] = []
    views: dict[tuple[int, int], BodyView] = {}
    for piece in pieces:
        if len(piece) <= INLINE_BYTES:
            small.append(piece)
            continue
        view = np.frombuffer(piece, np.uint8).view(BodyView)
        if small or not found:  # GZipMiddleware compares the first with `==`
            found.append(b"".join(small))
            small = []
        found.append(views.setdefault(place(piece), view))
    return [*found, b"".join(small)]
