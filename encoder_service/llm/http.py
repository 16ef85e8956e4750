"""The HTTP half of the chat API: bytes in, service.py, completions or server-sent events out."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from typing import Any

from fastapi import FastAPI, Request
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from encoder_service.api import envelope
from encoder_service.api.errors import fault
from encoder_service.api.exchange import Exchange
from encoder_service.api.upload import read_body
from encoder_service.llm.answer import DONE, Answers, error, event, models
from encoder_service.llm.schema import ChatRequest, InvalidKey, UnknownModel
from encoder_service.llm.service import ChatService, Parsed
from encoder_service.llm.types import Event, Finish
from encoder_service.service import Service

CHAT_PATH = "/v1/chat/completions"


def add(app: FastAPI, service: Service, chat: ChatService) -> None:
    """The routes of the chat API."""

    @app.post(CHAT_PATH)
    async def completions(request: Request) -> Response:
        """A chat completion, as OpenAI's API has it."""
        exchange: Exchange = request.state.exchange
        answers = Answers(chat.spec, exchange.request_id, int(time.time()))
        parsed = None
        try:
            service.authorize(request.headers.get("authorization"))
            with ExitStack() as held:
                take = held.enter_context(service.buffered.hold())
                parsed = await chat.parse(await read_body(request, service.limits, take))
                call = await chat.admit(parsed)
                exchange.admitted(call.media)
                if not parsed.request.stream:
                    return JSONResponse(answers.completion(*await chat.complete(call)))
                events = chat.stream(call)
                return await begun(events, parsed.request, answers, exchange, held)
        except ClientDisconnect:
            raise
        except Exception as problem:
            return refusal(problem, parsed, exchange)

    @app.get("/v1/models")
    async def list_models(request: Request) -> dict[str, Any]:
        """The language model that answers here."""
        service.authorize(request.headers.get("authorization"))
        return models(chat.spec)


def refusal(problem: Exception, parsed: Parsed | None, exchange: Exchange) -> Response:
    """An error in OpenAI's shape, with the status and headers of every other."""
    found = exchange.problem = fault(problem, exchange.request_id)
    param = problem.param if isinstance(problem, InvalidKey | UnknownModel) else None
    if parsed and found.item is not None:
        param = parsed.place(found.item)
    return envelope.response(found, error(found, param))


async def begun(
    events: AsyncGenerator[Event],
    request: ChatRequest,
    answers: Answers,
    exchange: Exchange,
    held: ExitStack,
) -> Response:
    """A stream, once its first piece is there: what fails before has a status of its own."""
    try:
        first = await anext(events)
    except BaseException:
        await events.aclose()
        raise
    chunks = written(first, events, request, answers, exchange)
    return EventStream(chunks, events, held.pop_all())


class EventStream(StreamingResponse):
    """Ends the generation with the connection, whoever ends that."""

    def __init__(
        self, body: AsyncGenerator[bytes], events: AsyncGenerator[Event], held: ExitStack
    ) -> None:
        headers = {"cache-control": "no-cache"}
        super().__init__(body, media_type="text/event-stream", headers=headers)
        self.chunks, self.events, self.held = body, events, held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        with self.held:
            try:
                await super().__call__(scope, receive, send)
            finally:
                await self.chunks.aclose()
                await self.events.aclose()


async def written(
    first: Event,
    rest: AsyncGenerator[Event],
    request: ChatRequest,
    answers: Answers,
    exchange: Exchange,
) -> AsyncGenerator[bytes]:
    """The server-sent events. An error in the middle is the last of them."""
    yield answers.chunk({"role": "assistant", "content": ""})
    try:
        async for one in chained(first, rest):
            if not isinstance(one, Finish):
                yield answers.chunk({"content": one.text})
                continue
            yield answers.chunk({}, one)
            options = request.stream_options
            if options and options.include_usage:
                yield answers.usage_chunk(one)
    except Exception as problem:
        exchange.problem = fault(problem, exchange.request_id)
        yield event(error(exchange.problem))
    yield DONE


async def chained(first: Event, rest: AsyncGenerator[Event]) -> AsyncGenerator[Event]:
    """The first, then the rest."""
    yield first
    async for one in rest:
        yield one
