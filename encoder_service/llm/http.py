"""The chat API over HTTP: request in, chat completion or server-sent events out, as OpenAI's."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from typing import Any

from fastapi import FastAPI, Request
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from encoder_service.api.errors import error_response, fault
from encoder_service.api.http import CHAT_PATH
from encoder_service.api.upload import read_body
from encoder_service.llm.schema import ChatEvent, ChatRequest, Finish, InvalidKey, UnknownModel
from encoder_service.llm.service import ChatService, Parsed
from encoder_service.llm.spec import LlmSpec
from encoder_service.ops.exchange import Exchange
from encoder_service.service import Service
from encoder_service.wire.formats import Document

DONE = b"data: [DONE]\n\n"


def add(app: FastAPI, service: Service, chat: ChatService) -> None:
    """Adds the chat API's routes, and the language model to what /readyz waits for."""
    service.ready["ready_llm_replicas"] = chat.ready_replicas

    @app.post(CHAT_PATH)
    async def completions(request: Request) -> Response:
        """A chat completion, as in OpenAI's API."""
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
        """The language model that is served."""
        service.authorize(request.headers.get("authorization"))
        return models(chat.spec)


def refusal(problem: Exception, parsed: Parsed | None, exchange: Exchange) -> Response:
    """An error in OpenAI's shape, with our usual status and headers."""
    found = fault(problem, exchange.request_id)
    exchange.failed(found.row.type, found.message)
    param = problem.param if isinstance(problem, InvalidKey | UnknownModel) else None
    if parsed and found.item is not None:
        param = parsed.place(found.item)
    return error_response(found, found.openai_document(param))


async def begun(
    events: AsyncGenerator[ChatEvent],
    request: ChatRequest,
    answers: Answers,
    exchange: Exchange,
    held: ExitStack,
) -> Response:
    """The stream, once its first event is there: earlier failures have a status of their own."""
    try:
        first = await anext(events)
    except BaseException:
        await events.aclose()
        raise
    chunks = written(first, events, request, answers, exchange)
    return EventStream(chunks, events, held.pop_all())


class EventStream(StreamingResponse):
    """Ends the generation when the connection ends, whichever side closes it."""

    def __init__(
        self, body: AsyncGenerator[bytes], events: AsyncGenerator[ChatEvent], held: ExitStack
    ) -> None:
        headers = {"cache-control": "no-cache"}
        super().__init__(body, media_type="text/event-stream", headers=headers)
        self.chunks, self.events, self.held = body, events, held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.held:
            try:
                await super().__call__(scope, receive, send)
            finally:
                await self.chunks.aclose()
                await self.events.aclose()


async def written(
    first: ChatEvent,
    rest: AsyncGenerator[ChatEvent],
    request: ChatRequest,
    answers: Answers,
    exchange: Exchange,
) -> AsyncGenerator[bytes]:
    """The server-sent events; an error becomes the last event before DONE."""
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
        found = fault(problem, exchange.request_id)
        exchange.failed(found.row.type, found.message)
        yield event(found.openai_document())
    yield DONE


async def chained(first: ChatEvent, rest: AsyncGenerator[ChatEvent]) -> AsyncGenerator[ChatEvent]:
    yield first
    async for one in rest:
        yield one


class Answers:
    def __init__(self, spec: LlmSpec, request_id: str, created: int) -> None:
        self.head: Document = {
            "id": f"chatcmpl-{request_id}",
            "created": created,
            "model": spec.id,
            "weights": "dummy" if spec.dummy else "checkpoint",
        }

    def completion(self, text: str, finish: Finish) -> Document:
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": finish.reason,
        }
        return self.head | {
            "object": "chat.completion",
            "choices": [choice],
            "usage": usage(finish),
        }

    def chunk(self, delta: Document, finish: Finish | None = None) -> bytes:
        choice = {
            "index": 0,
            "delta": delta,
            "finish_reason": finish.reason if finish else None,
        }
        return event(self.head | {"object": "chat.completion.chunk", "choices": [choice]})

    def usage_chunk(self, finish: Finish) -> bytes:
        """The last event before DONE, if `include_usage` is set."""
        document = {"object": "chat.completion.chunk", "choices": [], "usage": usage(finish)}
        return event(self.head | document)


def usage(finish: Finish) -> Document:
    """Token counts; an image or video counts as many as its embedding has rows."""
    return {
        "prompt_tokens": finish.prompt_tokens,
        "completion_tokens": finish.completion_tokens,
        "total_tokens": finish.prompt_tokens + finish.completion_tokens,
    }


def models(spec: LlmSpec) -> Document:
    entry = {
        "id": spec.id,
        "object": "model",
        "created": 0,
        "owned_by": "encoder-service",
        "max_model_len": spec.max_model_len,
        "weights": "dummy" if spec.dummy else "checkpoint",
    }
    return {"object": "list", "data": [entry]}


def event(document: Document) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"
