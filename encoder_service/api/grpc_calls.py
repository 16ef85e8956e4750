"""What all gRPC calls share: messages are read within bounds, and errors become a status.

The details of an error's status are JSON: {"type", "message", "item", "retryable"}, and
"retry_after_s" if there is one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from inspect import isasyncgen
from typing import Any
from weakref import WeakValueDictionary

import grpc
from google.protobuf.message import DecodeError

from actors.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    ServiceError,
    TooLarge,
    Unauthorized,
)
from actors.telemetry.tracing import Origin
from encoder_service.api.errors import fault, request_id_of
from encoder_service.ops.exchange import Exchange
from encoder_service.service import Service
from encoder_service.wire.encoder_grpc import SERVICE
from encoder_service.wire.formats import Document

CANCELLED = grpc.StatusCode.CANCELLED.name
MOST_DETAILS = 6000
"""Encoded characters of a status' details, because gRPC accepts 8192 bytes of metadata per call."""

OPEN_BYTES, OPEN_READS, OPEN_SECONDS = 2**16, 4, 5.0
"""Limits for messages of calls without a token: size, how many are read at a time, and for how
long. A stream that sends nothing for that time ends. The oldest one ends earlier when others
arrive."""

SHARED_SECONDS = 5.0
"""How long a message of a call with a token may take to arrive even if others wait."""

COUNTED = {"Encode": "grpc", "EncodeStream": "grpc_stream", "Plan": "grpc_plan"}
"""The calls that the metrics count, with the `api` label of each."""


class ReadInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Bounds the memory of messages before their calls are counted, because gRPC reads each message
    as a whole.

    Calls to encoder.v1.Encoder need a valid token before their message is read. Calls to the other
    services need none, so fewer are read at a time and only small messages are accepted. The same
    limits apply to calls that send no media.
    Every handler is wrapped as a streaming one, because gRPC reads the message of a unary request
    before it calls the handler.
    """

    def __init__(self, service: Service, most_bytes: int, stopping: asyncio.Event) -> None:
        """`most_bytes`: size of the largest message that gRPC accepts. `stopping` ends streams."""
        self.service = service
        self.stopping = stopping
        self.most_bytes = most_bytes
        self.reads = Reads(
            service.limits.max_buffered_bytes // most_bytes, service.limits.timeout_seconds
        )
        self.open_reads = OpenReads()

    async def intercept_service(
        self,
        continuation: Callable[[Any], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        service, _, method = handler_call_details.method.rpartition("/")
        reads: Reads | OpenReads = self.open_reads
        most_bytes, error = OPEN_BYTES, None
        if service == f"/{SERVICE.full_name}":
            if method in COUNTED:  # the others' messages are small
                reads, most_bytes = self.reads, self.most_bytes
            metadata = handler_call_details.invocation_metadata
            try:
                self.service.authorize(*(one for key, one in metadata if key == "authorization"))
            except Unauthorized as found:
                error = found
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        api = COUNTED.get(method)

        async def first(context: grpc.aio.ServicerContext) -> Any:
            """The call's message, or None at the end of a stream. Otherwise aborts the call."""
            problem: ServiceError
            try:
                if error:
                    raise error
                self.reads.seconds = self.service.limits.timeout_seconds
                raw = await reads.read(context)
                if raw is grpc.aio.EOF and handler.request_streaming:
                    return None
                if raw is grpc.aio.EOF:
                    raise InvalidRequest("the call has no message")
                if len(raw) > most_bytes:
                    raise TooLarge(f"the message is over {most_bytes} bytes")
                return handler.request_deserializer(raw)
            except DecodeError:
                problem = InvalidRequest(
                    "the message cannot be parsed: does the client use another .proto?"
                )
            except ServiceError as found:
                problem = found
            async with answering(self.service, api, context):
                raise problem

        async def messages(context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            while not self.stopping.is_set() and (message := await first(context)) is not None:
                yield message

        async def unary(_: Any, context: grpc.aio.ServicerContext) -> Any:
            return await handler.unary_unary(await first(context), context)

        async def stream(_: Any, context: grpc.aio.ServicerContext) -> None:
            if handler.request_streaming:
                answers = handler.stream_stream(messages(context), context)
            else:
                answers = handler.unary_stream(await first(context), context)
            if not isasyncgen(answers):
                await answers
                return
            async with aclosing(answers):
                async for answer in answers:
                    await context.write(answer)

        serializer = handler.response_serializer
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(stream, None, serializer)
        return grpc.stream_unary_rpc_method_handler(unary, None, serializer)


class Reads:
    """Limits how many messages are read at a time, and for how long. One connection can use at most
    half of the reads.

    A read that takes over SHARED_SECONDS ends when others wait, because gRPC does not tell whether
    any of its message has arrived, and callers that send nothing would keep the others waiting.
    """

    def __init__(self, at_once: int, seconds: float) -> None:
        self.seconds = seconds
        self.each = max(1, at_once // 2)
        self.all = asyncio.Semaphore(max(1, at_once))
        self.peers = WeakValueDictionary[str, asyncio.Semaphore]()
        self.waiting = 0

    async def read(self, context: grpc.aio.ServicerContext) -> Any:
        """The next message, as bytes, or EOF. Raises DeadlineExceeded, or Overloaded."""
        peer = self.peers.setdefault(context.peer(), asyncio.Semaphore(self.each))
        try:
            async with asyncio.timeout(self.seconds), peer, self._turn():
                read = asyncio.ensure_future(context.read())
                try:
                    while not (await asyncio.wait([read], timeout=SHARED_SECONDS))[0]:
                        if self.waiting:
                            raise Overloaded(
                                f"the message did not arrive within {SHARED_SECONDS:g} s, and "
                                "others are waiting: send it again, or send less"
                            )
                    return read.result()
                finally:
                    read.cancel()
        except TimeoutError:
            raise DeadlineExceeded(
                f"the message did not arrive within {self.seconds:g} s"
            ) from None

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        self.waiting += 1
        try:
            await self.all.acquire()
        finally:
            self.waiting -= 1
        try:
            yield
        finally:
            self.all.release()


class OpenReads:
    """Reads messages of calls without a token or media.

    A read beyond OPEN_READS ends the oldest one. Otherwise callers that send nothing could keep
    health checks waiting.
    """

    def __init__(self) -> None:
        self.reading = list[asyncio.Timeout]()

    async def read(self, context: grpc.aio.ServicerContext) -> Any:
        """The next message, as bytes, or EOF. Raises DeadlineExceeded."""
        if len(self.reading) >= OPEN_READS and not (oldest := self.reading.pop(0)).expired():
            oldest.reschedule(0)
        limit = asyncio.timeout(OPEN_SECONDS)
        self.reading.append(limit)
        try:
            async with limit:
                return await context.read()
        except TimeoutError:
            raise DeadlineExceeded("the message did not arrive in time: send it at once") from None
        finally:
            with suppress(ValueError):
                self.reading.remove(limit)


@asynccontextmanager
async def answering(
    service: Service, api: str | None, context: grpc.aio.ServicerContext
) -> AsyncIterator[Exchange]:
    """Wraps a call: records it as `api`, and turns exceptions into the status that ends it."""
    metadata = dict(context.invocation_metadata() or ())
    request_id = request_id_of(metadata.get("request_id"))
    trailing = [("request_id", request_id)]
    context.set_trailing_metadata(tuple(trailing))
    origin = Origin(request_id, metadata.get("traceparent", ""))
    with service.observer.exchange(api, origin, CANCELLED) as exchange:
        try:
            yield exchange
            exchange.code = grpc.StatusCode.OK.name
            return
        except grpc.aio.InternalError as error:  # a message that was not sent: the client left
            raise asyncio.CancelledError from error
        except Exception as error:
            if context.cancelled():  # the client left, so nobody is told
                raise
            problem = fault(error, request_id)
        exchange.code = problem.row.code.name
        exchange.failed(problem.row.type, problem.message)
    document = problem.document()
    if (wait := problem.retry_after_seconds) is not None:
        document["retry_after_s"] = wait
        trailing.append(("retry-after", f"{wait:g}"))
    await context.abort(problem.row.code, details(document), tuple(trailing))


def details(document: Document) -> str:
    """An error as JSON, its message cut to fit. gRPC encodes each percent sign as three bytes."""
    text = json.dumps(document)
    while len(text) + 2 * text.count("%") > MOST_DETAILS:
        document = document | {"message": document["message"][: len(document["message"]) // 2]}
        text = json.dumps(document)
    return text
