"""The API over HTTP: a FastAPI application around one Service.

Knows nothing of Ray. Health, metrics and the documentation are open; all else asks for the token,
if there is one: scrapers, probes and browsers send none, and those pages tell nothing of content.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse
from starlette.exceptions import HTTPException

from actors.errors import InvalidOption, UnsupportedMedia
from encoder_service.api.answer import Json
from encoder_service.api.envelope import Envelope, http_exception
from encoder_service.api.openapi import DESCRIPTION, ENCODE, ERRORS, FETCH, MISSING, describe
from encoder_service.api.pieces import response
from encoder_service.api.schema import request_options
from encoder_service.api.upload import check_length, read
from encoder_service.llm import http as chat_http
from encoder_service.llm.service import ChatService
from encoder_service.ops.metrics import CONTENT_TYPE, merge
from encoder_service.ops.offload import offload
from encoder_service.ops.page import page, policy
from encoder_service.service import Service
from encoder_service.wire.documents import choose, render
from encoder_service.wire.formats import JSON, MSGPACK, WireError

ENCODE_PATH = "/v1/encode"
REFERENCE_PATH = "/v1/embeddings/{reference}"


def build(service: Service, chat: ChatService | None = None) -> FastAPI:
    """The application; with the chat API if there is a language model."""
    app = FastAPI(
        title="Encoder Service",
        description=DESCRIPTION,
        version=service.card["versions"]["encoder-service"],
        redoc_url=None,
        exception_handlers={HTTPException: http_exception},
    )
    counted = {ENCODE_PATH: "http", chat_http.CHAT_PATH: "chat"}
    app.add_middleware(Envelope, observer=service.observer, counted=counted)

    @app.post(ENCODE_PATH, responses=ERRORS, openapi_extra=ENCODE, response_class=Response)
    async def encode(request: Request) -> Response:
        """Embeddings of images and videos, in the order of the request."""
        service.authorize(request.headers.get("authorization"))
        if request.query_params:
            raise InvalidOption("options stand in the body's `options`, not in the query")
        accept = answer_format(request.headers.get("accept", ""))
        check_length(request, service.limits)  # too much for ever, not for now
        service.backend.check_room()
        with service.buffered.hold() as take:
            items, values = await read(request, service.limits, take)
            options = request_options(values)
            if options.encoding and accept != JSON:
                raise InvalidOption(f"options.encoding: only with `Accept: {JSON}`, not {accept}")
            document = await service.encode(items, options, request.state.exchange)
        return await rendered(document, accept, options.encoding or "base64")

    @app.get(REFERENCE_PATH, responses=ERRORS | MISSING, openapi_extra=FETCH)
    async def fetch(request: Request, reference: str) -> Response:
        """The embedding that is kept under an id: a response with one item."""
        service.authorize(request.headers.get("authorization"))
        accept = answer_format(request.headers.get("accept", ""))
        document = await service.fetch(reference, request.state.exchange.request_id)
        return await rendered(document, accept)

    @app.delete(REFERENCE_PATH, responses=ERRORS | MISSING, status_code=204)
    async def release(request: Request, reference: str) -> None:
        """Lets go of an embedding before its time is over."""
        service.authorize(request.headers.get("authorization"))
        await service.release(reference)

    @app.get("/v1/model", responses=ERRORS)
    async def model(request: Request) -> dict[str, Any]:
        """What is served: the model, its budgets and limits, versions."""
        service.authorize(request.headers.get("authorization"))
        return service.card

    @app.get("/v1/status", responses=ERRORS)
    async def status(request: Request) -> dict[str, Any]:
        """The fleet at a glance: totals since the replicas began, about a second old."""
        service.authorize(request.headers.get("authorization"))
        return await service.status.get()

    @app.get("/", response_class=HTMLResponse)
    async def status_page() -> HTMLResponse:
        """The status for people. Asks for the token in the browser, if there is one."""
        headers = {"content-security-policy": policy(), "cache-control": "no-cache"}
        return HTMLResponse(page(), headers=headers)

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """The process answers."""
        return {"status": "ok"}

    @app.get("/readyz", responses={503: ERRORS[503]})
    async def readyz() -> dict[str, int]:
        """Replicas that are ready: every path captured, weights loaded. 503 while one lacks."""
        ready = {"ready_replicas": await service.backend.ready_replicas()}
        return ready | ({"ready_llm_replicas": await chat.ready_replicas()} if chat else {})

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """The series of all replicas, for Prometheus: scrape one address, not each replica."""
        page = await asyncio.to_thread(merge, await service.scrape.get())
        return Response(page, headers={"content-type": CONTENT_TYPE})

    if chat:
        chat_http.add(app, service, chat)
    describe(app, closed=service.tokens.required)
    return app


async def rendered(document: Json, accept: str, encoding: str = "base64") -> Response:
    """The document as a response; what copies its data does so in a thread."""
    size_bytes = sum(len(one.get("data", b"")) for one in document["items"])
    copied_bytes = 0 if accept == MSGPACK else size_bytes
    return await response(*await offload(copied_bytes, render, document, accept, encoding))


def answer_format(accept: str) -> str:
    """The response's content type. Raises UnsupportedMedia before any work is done."""
    try:
        return choose(accept)
    except WireError as error:
        raise UnsupportedMedia(str(error)) from None
