"""OpenAI's chat API: a request in, a chat completion or server-sent events out.

Needs neither Ray nor torch: it reaches the language models through `ChatBackend`, which ingress.py
implements.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol

from fastapi import FastAPI, Request
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from actors.errors import EmbeddingLost, InvalidOption, InvalidRequest, ServiceError, Unavailable
from actors.spec.model_spec import ModelSpec
from actors.spec.sizing import EnlargingSizing
from actors.spec.video import FRAMES_PER_GROUP, TotalPixels, retained_tokens
from actors.telemetry.tracing import ORIGIN
from actors.types import Media, ProcessorKwargs
from encoder_service.api.errors import AtItem, error_response, fault
from encoder_service.api.http import CHAT_PATH, MODELS_PATH
from encoder_service.api.schema import schema
from encoder_service.api.upload import read_body
from encoder_service.config import LlmOptions
from encoder_service.intake.limits import Deadline, Take, offload
from encoder_service.intake.media import Admission
from encoder_service.llm.calls import ChatCall, ChatEvent, Finish, Piece, Reason
from encoder_service.llm.schema import (
    LOW_PIXELS,
    REQUESTS,
    ChatKwargs,
    ChatRequest,
    ImagePart,
    InvalidKey,
    UnknownModel,
    VideoPart,
    item,
    parse,
)
from encoder_service.llm.spec import LlmSpec
from encoder_service.ops.exchange import Exchange
from encoder_service.service import Service
from encoder_service.wire.documents import RequestItem
from encoder_service.wire.formats import JSON, Document, WireError, read_json

ATTEMPTS = 3
"""Maximum attempts at a request whose replica is lost, or whose rows are lost during generation,
before any text was sent. Embeddings that are lost earlier do not count, because router/here.py
retries them."""

MOST_VALUES = 2**20
"""Maximum number of values in a body, as wire/formats.py counts them: commas in texts count too."""

MOST_CHARACTERS_A_TOKEN = 100
"""More than any text has per token on average. A longer text is rejected before tokenisation."""

DONE = b"data: [DONE]\n\n"


class ReplicaLost(Unavailable):
    """The language model's replica died; another one may answer."""


class ChatBackend(Protocol):
    """The language model's replicas. Raises only the errors of actors/errors.py."""

    def complete(self, call: ChatCall) -> AsyncGenerator[ChatEvent]:
        """Yields the text as it is generated, then Finish. Closing it ends the generation."""

    async def ready_replicas(self) -> int:
        """How many replicas accept work."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A valid request, not yet admitted."""

    request: ChatRequest
    items: tuple[RequestItem, ...]

    def place(self, index: int) -> str:
        return list(self.request.media())[index][0]


class ChatService:
    """Parses and admits requests, queries a language model, and retries if its replica is lost."""

    def __init__(
        self, options: LlmOptions, spec: LlmSpec, admission: Admission, backend: ChatBackend
    ) -> None:
        self.options = options
        self.spec = spec
        self.admission = admission
        self.backend = backend

    async def parse(self, body: bytes) -> Parsed:
        """Raises InvalidRequest, or UnknownModel."""
        parsed = await offload(len(body), self._parse, body)
        self.check_model(parsed.request.model)
        return parsed

    def check_model(self, named: str) -> None:
        """Raises UnknownModel."""
        if named != self.spec.id:
            raise UnknownModel(f"model {named[:100]!r} is not served here; {self.spec.id!r} is")

    def _parse(self, body: bytes) -> Parsed:
        try:
            request = parse(read_json(body, MOST_VALUES), self.options.engine)
        except WireError as error:
            raise InvalidRequest(str(error)) from None
        if request.tool_use() and not self.options.tool_parser:
            raise InvalidKey(
                "tools: this service has no parser of tool calls: set llm.tool_parser, such as to "
                'hermes, or send tool_choice "none"',
                "tools",
            )
        characters = request.characters()
        if characters > MOST_CHARACTERS_A_TOKEN * self.spec.max_model_len:
            raise InvalidRequest(
                f"the messages and tools are {characters} characters; the maximum context length "
                f"is {self.spec.max_model_len} tokens (llm.max_model_len): send less"
            )
        return Parsed(request, tuple(item(*one) for one in request.media()))

    async def admit(self, parsed: Parsed, take: Take) -> ChatCall:
        """Admits the images and videos. `take` counts the bytes that are fetched. Raises
        ServiceError, or AtItem with the position of the image or video at fault."""
        media: list[Media] = []
        admitted: list[Media | ServiceError] = []
        if parsed.items:
            admission = self.admission
            given = parsed.request.mm_processor_kwargs
            kwargs = kwargs_of(given, parsed.items, admission.spec)
            detailed = [
                with_detail(item, part, admission, kwargs)
                for item, (_, part) in zip(parsed.items, parsed.request.media(), strict=True)
            ]
            admitted = await admission.admit(
                detailed, take, self.options.video_pruning_rate, kwargs=kwargs
            )
        for index, one in enumerate(admitted):
            if isinstance(one, ServiceError):
                raise AtItem(index, one)
            media.append(one)
        tokens = sum(retained_tokens(one.plan, one.evs_rate) for one in media)
        if tokens >= self.spec.max_model_len:  # before the encoders do useless work
            raise InvalidRequest(
                f"the images and videos are {tokens} tokens; the maximum context length is "
                f"{self.spec.max_model_len} (llm.max_model_len): send less, or scale them down"
            )
        return ChatCall(
            messages=tuple(message.for_template() for message in parsed.request.messages),
            media=tuple(media),
            sampling=parsed.request.sampling(),
            timeout_seconds=self.options.timeout_seconds,
            origin=ORIGIN.get(),
            stream=parsed.request.stream,
            counted=parsed.request.counted,
            tool_use=parsed.request.tool_use(),
        )

    async def ready_replicas(self) -> int:
        """Raises Unavailable if there is none."""
        ready = await self.backend.ready_replicas()
        if not ready:
            raise Unavailable("no language model is ready yet: replicas are loading weights")
        return ready

    async def complete(self, call: ChatCall) -> tuple[list[Piece], Finish]:
        """Returns the whole completion. Starts over if the replica is lost, or rows that vLLM reads
        again after a preemption."""
        pieces: list[Piece] = []
        async with aclosing(self._events(call, pieces.clear)) as events:
            async for event in events:
                if isinstance(event, Finish):
                    return pieces, event
                pieces.append(event)
        raise AssertionError("an answer without an end. This is a bug.")

    def stream(self, call: ChatCall) -> AsyncGenerator[ChatEvent]:
        """Yields the text as it is generated. Retries if the replica is lost before any event."""
        return self._events(call, None)

    async def _events(
        self, call: ChatCall, forget: Callable[[], None] | None
    ) -> AsyncGenerator[ChatEvent]:
        """`forget` discards the events of a lost replica. None: they have been sent already."""
        deadline = Deadline(
            call.timeout_seconds, "ask for fewer tokens, or raise llm.timeout_seconds"
        )
        for attempt in range(1, ATTEMPTS + 1):
            begun = False
            try:
                async with aclosing(self.backend.complete(call)) as events:
                    while True:
                        # The deadline covers waiting, not the time that the consumer takes.
                        event = await deadline.keep(anext(events))
                        begun = True
                        yield event
                        if isinstance(event, Finish):
                            return
            except ReplicaLost:
                if attempt == ATTEMPTS or (begun and forget is None):
                    raise
                if forget:
                    forget()
            except EmbeddingLost:
                if attempt == ATTEMPTS or not begun or forget is None:
                    raise
                forget()


def with_detail(
    item: RequestItem, part: ImagePart | VideoPart, admission: Admission, kwargs: ProcessorKwargs
) -> RequestItem:
    """Returns the item with the `max_pixels` that its `detail` stands for. `kwargs`: those of the
    request, whose `min_pixels` are lowered to that."""
    spec = admission.spec
    most = spec.largest("image", admission.tokens).get("max_pixels")
    if not isinstance(part, ImagePart) or part.image_url.detail == "auto" or not most:
        return item
    low = part.image_url.detail == "low"
    sizing = spec.sizing if low else spec.own_sizing or spec.sizing
    pixels = min(LOW_PIXELS if low else math.inf, sizing.defaults()["max_pixels"] or most, most)
    fewest = min(kwargs.min_pixels, int(pixels)) if kwargs.min_pixels else None
    return replace(item, min_pixels=fewest, max_pixels=int(pixels))


def kwargs_of(given: ChatKwargs, items: Sequence[RequestItem], spec: ModelSpec) -> ProcessorKwargs:
    """Converts `mm_processor_kwargs` to ProcessorKwargs. Raises InvalidKey."""
    kwargs, size = given.kwargs(), given.size
    if size is None:
        return kwargs
    if isinstance(spec.video, TotalPixels) and any(item.type == "video" for item in items):
        raise InvalidKey(
            "mm_processor_kwargs.size: of a video it counts the pixels of all frames together: "
            "give min_pixels and max_pixels, those of each frame",
            "mm_processor_kwargs",
        )
    # GLM-V counts an image as a group of equal frames, and the pixels of each of them.
    frames = FRAMES_PER_GROUP if isinstance(spec.sizing, EnlargingSizing) else 1
    return replace(
        kwargs,
        min_pixels=kwargs.min_pixels or (size.shortest_edge and -(-size.shortest_edge // frames)),
        max_pixels=kwargs.max_pixels or (size.longest_edge and max(1, size.longest_edge // frames)),
    )


def add(app: FastAPI, service: Service, chat: ChatService) -> None:
    """Adds the chat API's routes, and makes /readyz wait for the language model."""
    service.ready["ready_llm_replicas"] = chat.ready_replicas
    kind = REQUESTS[chat.options.engine]
    app.state.bodies.append(kind)
    body = {"required": True, "content": {JSON: schema(kind)}}
    entry = {
        "id": chat.spec.id,
        "object": "model",
        "created": 0,
        "owned_by": "encoder-service",
        "max_model_len": chat.spec.max_model_len,
        "weights": chat.spec.weights,
    }

    @app.post(CHAT_PATH, openapi_extra={"requestBody": body})
    async def completions(request: Request) -> Response:
        """A chat completion, as in OpenAI's API."""
        exchange: Exchange = request.state.exchange
        answers = Answers(chat.spec, exchange.request_id)
        parsed = None
        try:
            service.authorize(*request.headers.getlist("authorization"))
            async with AsyncExitStack() as held:
                take = held.enter_context(service.buffered.hold())
                parsed = await chat.parse(await read_body(request, service.limits, take))
                call = await chat.admit(parsed, take)
                exchange.admitted(call.media)
                if not parsed.request.stream:
                    return JSONResponse(answers.completion(*await chat.complete(call)))
                events = await held.enter_async_context(aclosing(chat.stream(call)))
                first = await anext(events)  # an error before this still gets its own HTTP status
                chunks = written(first, events, parsed.request, answers, exchange)
                await held.enter_async_context(aclosing(chunks))
                return EventStream(chunks, held.pop_all())
        except ClientDisconnect:
            raise
        except Exception as problem:
            return refusal(problem, exchange, parsed.place if parsed else None)

    @app.get(MODELS_PATH)
    async def list_models(request: Request) -> dict[str, Any]:
        """The language model that is served."""
        service.authorize(*request.headers.getlist("authorization"))
        return {"object": "list", "data": [entry]}

    @app.get(MODELS_PATH + "/{model:path}", response_model=None)
    async def show_model(request: Request, model: str) -> dict[str, Any] | Response:
        """The language model of this name, which may contain slashes."""
        try:
            service.authorize(*request.headers.getlist("authorization"))
            chat.check_model(model)
        except Exception as problem:
            return refusal(problem, request.state.exchange)
        return entry


def refusal(
    problem: Exception, exchange: Exchange, place: Callable[[int], str] | None = None
) -> Response:
    """Formats an error as OpenAI does, with our usual status and headers. `place`: returns the path
    of an item in the request."""
    found = fault(problem, exchange.request_id)
    exchange.failed(found.row.type, found.message)
    param = problem.param if isinstance(problem, InvalidKey | UnknownModel) else None
    if isinstance(problem, InvalidOption):
        param = "mm_processor_kwargs"
    if place and found.item is not None:
        param = place(found.item)
    return error_response(found, found.openai_document(param))


class EventStream(StreamingResponse):
    """Ends the generation when the connection ends, whichever side closes it."""

    media_type = "text/event-stream"

    def __init__(self, body: AsyncGenerator[bytes], held: AsyncExitStack) -> None:
        super().__init__(body, headers={"cache-control": "no-cache"})
        self.held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.held:
            await super().__call__(scope, receive, send)


async def written(
    event: ChatEvent,
    rest: AsyncGenerator[ChatEvent],
    request: ChatRequest,
    answers: Answers,
    exchange: Exchange,
) -> AsyncGenerator[bytes]:
    """Yields the server-sent events. An error becomes the last event before DONE."""
    for index in range(request.n or 1):
        yield answers.chunk(index, {"role": "assistant", "content": ""})
    try:
        while not isinstance(event, Finish):
            delta: Document = {"content": event.text} if event.text or not event.tool_calls else {}
            if event.tool_calls:
                delta["tool_calls"] = list(event.tool_calls)
            yield answers.chunk(event.index, delta, event.logprobs, used=event.usage)
            event = await anext(rest)
        for index, reason in enumerate(event.reasons):
            yield answers.chunk(index, {}, reason=reason)
        if request.stream_options and request.stream_options.include_usage:
            yield answers.usage_chunk(event.usage)
    except Exception as problem:
        found = fault(problem, exchange.request_id)
        exchange.failed(found.row.type, found.message)
        yield sent(found.openai_document())
    yield DONE


class Answers:
    """Builds the JSON documents of one completion."""

    def __init__(self, spec: LlmSpec, request_id: str) -> None:
        self.head: Document = {
            "id": f"chatcmpl-{request_id}",
            "created": int(time.time()),
            "model": spec.id,
            "weights": spec.weights,
        }

    def completion(self, pieces: Sequence[Piece], finish: Finish) -> Document:
        choices = []
        for index, reason in enumerate(finish.reasons):
            own = [piece for piece in pieces if piece.index == index]
            text = "".join(piece.text for piece in own)
            message: Document = {"role": "assistant", "content": text}
            if calls := [call for piece in own for call in piece.tool_calls]:
                message["content"] = text or None
                message["tool_calls"] = [
                    {name: value for name, value in call.items() if name != "index"}
                    for call in calls
                ]
            choice: Document = {"index": index, "message": message}
            choice |= likelihood([token for piece in own for token in piece.logprobs])
            choices.append(choice | {"finish_reason": reason})
        more = {"object": "chat.completion", "choices": choices, "usage": usage(*finish.usage)}
        return self.head | more

    def chunk(
        self,
        index: int,
        delta: Document,
        logprobs: Sequence[Document] = (),
        reason: Reason | None = None,
        used: tuple[int, int] | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta} | likelihood(logprobs)
        more = {"usage": usage(*used)} if used else {}
        return self._chunk(choices=[choice | {"finish_reason": reason}], **more)

    def usage_chunk(self, used: tuple[int, int]) -> bytes:
        """The last event before DONE, if `include_usage` is set."""
        return self._chunk(choices=[], usage=usage(*used))

    def _chunk(self, **more: Any) -> bytes:
        return sent(self.head | {"object": "chat.completion.chunk"} | more)


def likelihood(tokens: Sequence[Document]) -> Document:
    """`logprobs` of a choice, if the request asked for them."""
    return {"logprobs": {"content": list(tokens)}} if tokens else {}


def usage(prompt_tokens: int, completion_tokens: int) -> Document:
    """Token counts. An image or video counts one token per row of its embedding."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def sent(document: Document) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"
