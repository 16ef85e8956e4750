"""The API over gRPC, and the standard health service. Serve calls methods by their proto names.

An error is a status whose details are JSON: {"type", "message", "item", "retryable"}, and
"retry_after_s" if there is one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health_pb2

from actors.errors import InvalidRequest, ServiceError, TooLarge
from actors.telemetry.tracing import Origin
from encoder_service.api.answer import Json, head
from encoder_service.api.envelope import request_id_of
from encoder_service.api.errors import Fault, fault
from encoder_service.api.schema import RequestOptions, request_options
from encoder_service.config import LimitOptions
from encoder_service.intake.limits import offload
from encoder_service.ops.exchange import Exchange
from encoder_service.service import Service
from encoder_service.wire import encoder_pb2 as pb
from encoder_service.wire.documents import RequestItem, parse_item
from encoder_service.wire.formats import WireError

CANCELLED = grpc.StatusCode.CANCELLED.name
CHUNK_BYTES = 2**20
MOST_DETAILS = 6000
"""Encoded characters of a status' details: gRPC accepts 8192 bytes of metadata per call."""

HEALTH_NAMES = ("", "encoder.v1.Encoder")
WATCH_SECONDS = 1.0
MOST_WATCHES = 4
"""At a time, because each occupies one of ingress.max_ongoing_requests and needs no token."""

Health = health_pb2.HealthCheckResponse


class Context(Protocol):
    """The part of ray.serve.grpc_util.RayServegRPCContext that is used here."""

    def invocation_metadata(self) -> Sequence[tuple[str, str]]: ...
    def trailing_metadata(self) -> Sequence[tuple[str, str]]: ...
    def set_code(self, code: grpc.StatusCode) -> None: ...
    def set_details(self, details: str) -> None: ...
    def set_trailing_metadata(self, metadata: list[tuple[str, str]]) -> None: ...


class Refused(Exception):
    """Ends a call whose status is already set: a stream, or a call without a valid token."""


class EncoderCalls:
    """The service encoder.v1.Encoder."""

    service: Service

    async def Encode(self, request: pb.EncodeRequest, grpc_context: Context) -> pb.EncodeResponse:
        with self.answering("grpc", grpc_context) as exchange:
            sent_bytes = self.check(request)
            with self.service.buffered.hold() as take:
                take(sent_bytes)
                items, options = read(request)
                document = await self.service.encode(items, options, exchange)
            size_bytes = sum(len(one.get("data", b"")) for one in document["items"])
            return await offload(size_bytes, response, document)
        return pb.EncodeResponse()

    async def EncodeStream(
        self, request: pb.EncodeRequest, grpc_context: Context
    ) -> AsyncIterator[pb.EncodeChunk]:
        """Each item as soon as it is ready, in chunks of about a megabyte."""
        with self.answering("grpc_stream", grpc_context) as exchange:
            sent_bytes = self.check(request)
            with self.service.buffered.hold() as take:
                take(sent_bytes)
                items, options = read(request)
                async with aclosing(self.service.stream(items, options, exchange)) as documents:
                    async for document in documents:
                        for chunk in chunks(head(self.service.spec), document):
                            yield chunk
            return
        # Serve drops the status of a stream that ends without an exception.
        raise Refused

    async def Fetch(
        self, request: pb.FetchRequest, grpc_context: Context
    ) -> AsyncIterator[pb.EncodeChunk]:
        """The embedding that is kept under an id, in chunks as from EncodeStream."""
        with self.answering(None, grpc_context) as exchange:
            document = await self.service.fetch(request.reference, exchange.request_id)
            for chunk in chunks(head(self.service.spec), document["items"][0]):
                yield chunk
            return
        raise Refused

    async def Release(
        self, request: pb.ReleaseRequest, grpc_context: Context
    ) -> pb.ReleaseResponse:
        with self.answering(None, grpc_context):
            await self.service.release(request.reference)
        return pb.ReleaseResponse()

    async def GetModel(
        self, request: pb.GetModelRequest, grpc_context: Context
    ) -> pb.GetModelResponse:
        with self.answering(None, grpc_context):
            return pb.GetModelResponse(json=json.dumps(self.service.card))
        return pb.GetModelResponse()

    def check(self, request: pb.EncodeRequest) -> int:
        """The request's size in bytes. Raises TooLarge, or Overloaded if the router is full."""
        size_bytes = check_size(request, self.service.limits)
        self.service.backend.check_room()
        return size_bytes

    @contextmanager
    def answering(self, api: str | None, context: Context) -> Iterator[Exchange]:
        """Wraps a call: checks the token, records it as `api`, turns exceptions into a status."""
        metadata = dict(context.invocation_metadata())
        # Serve puts the client's id here, or one of its own.
        given = dict(context.trailing_metadata()).get("request_id")
        request_id = request_id_of(given)
        trailing = [] if request_id == given else [("request_id", request_id)]
        context.set_trailing_metadata(trailing)
        origin = Origin(request_id, metadata.get("traceparent", ""))
        begun = False
        with self.service.observer.exchange(api, origin, CANCELLED) as exchange:
            try:
                self.service.authorize(metadata.get("authorization"))
                begun = True
                yield exchange
                exchange.code = grpc.StatusCode.OK.name
            except Exception as error:
                problem = fault(error, request_id)
                exchange.code = problem.row.code.name
                exchange.failed(problem.row.type, problem.message)
                refuse(context, problem, trailing)
        if not begun:  # a context manager cannot skip its block
            raise Refused


class HealthCalls:
    """The service grpc.health.v1.Health. Needs no token, because probes send none."""

    service: Service
    watches = 0

    async def Check(
        self, request: health_pb2.HealthCheckRequest, grpc_context: Context
    ) -> health_pb2.HealthCheckResponse:
        """SERVING or NOT_SERVING; NOT_FOUND for an unknown service."""
        if request.service not in HEALTH_NAMES:
            grpc_context.set_code(grpc.StatusCode.NOT_FOUND)
            grpc_context.set_details(f"no service {request.service!r}; known are {HEALTH_NAMES}")
            return Health()
        return Health(status=await self._serving())

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, grpc_context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The status and every change of it, until the client leaves or Serve's time limit is over.

        RESOURCE_EXHAUSTED beyond MOST_WATCHES; SERVICE_UNKNOWN for an unknown service.
        """
        if request.service not in HEALTH_NAMES:
            yield Health(status=Health.SERVICE_UNKNOWN)
            return
        if self.watches >= MOST_WATCHES:
            grpc_context.set_code(grpc.StatusCode.RESOURCE_EXHAUSTED)
            grpc_context.set_details(f"{MOST_WATCHES} others watch already: call Check instead")
            raise Refused
        self.watches += 1
        try:
            last = None
            while True:
                status = await self._serving()
                if status != last:
                    yield Health(status=status)
                    last = status
                await asyncio.sleep(WATCH_SECONDS)
        finally:
            self.watches -= 1

    async def List(
        self, request: health_pb2.HealthListRequest, grpc_context: Context
    ) -> health_pb2.HealthListResponse:
        status = await self._serving()
        return health_pb2.HealthListResponse(
            statuses={name: Health(status=status) for name in HEALTH_NAMES}
        )

    async def _serving(self) -> int:
        try:
            await self.service.backend.ready_replicas()
        except ServiceError:
            return int(Health.NOT_SERVING)
        return int(Health.SERVING)


def refuse(context: Context, problem: Fault, trailing: list[tuple[str, str]]) -> None:
    """Sets the status of a call. `trailing`: metadata that is sent in any case."""
    wait = problem.retry_after_seconds
    document = problem.document() | ({} if wait is None else {"retry_after_s": wait})
    context.set_code(problem.row.code)
    context.set_details(details(document))
    if wait is not None:
        context.set_trailing_metadata([*trailing, ("retry-after", f"{wait:g}")])


def details(document: Json) -> str:
    """An error as JSON, its message cut to fit. gRPC encodes a percent sign as three bytes."""
    text = json.dumps(document)
    while len(text) + 2 * text.count("%") > MOST_DETAILS:
        document = document | {"message": document["message"][: len(document["message"]) // 2]}
        text = json.dumps(document)
    return text


def check_size(request: pb.EncodeRequest, limits: LimitOptions) -> int:
    """The size in bytes. Raises TooLarge before items are read: millions of them may be empty."""
    if len(request.items) > limits.max_items:
        raise TooLarge(
            f"{len(request.items)} items in one request; limits.max_items is {limits.max_items}: "
            "send several requests"
        )
    size_bytes: int = request.ByteSize()
    if size_bytes > limits.max_body_bytes:
        raise TooLarge(
            f"the request is over {limits.max_body_bytes} bytes (limits.max_body_bytes): "
            "send fewer items"
        )
    return size_bytes


def read(request: pb.EncodeRequest) -> tuple[list[RequestItem], RequestOptions]:
    """Items and options, after check_size. Raises InvalidRequest, InvalidOption."""
    given: dict[str, Any] = {field.name: value for field, value in request.options.ListFields()}
    return [request_item(i, one) for i, one in enumerate(request.items)], request_options(given)


def request_item(index: int, one: pb.Item) -> RequestItem:
    """Checked as an item of an HTTP request is. Raises InvalidRequest."""
    given: Json = {"type": one.type or "image"}
    source = one.WhichOneof("source")
    if source == "frames":
        given |= {"frames": list(one.frames.data), "fps": one.frames.fps or None}
    elif source:
        given[source] = getattr(one, source)
    try:
        return parse_item(given, f"items[{index}]")
    except WireError as error:
        raise InvalidRequest(str(error)) from None


def response(document: Json) -> pb.EncodeResponse:
    return pb.EncodeResponse(
        model=document["model"],
        family=document["family"],
        weights=document["weights"],
        items=[embedding(one) for one in document["items"]],
        timings=pb.Timings(**document["timings"]),
    )


def embedding(document: Json) -> pb.Embedding:
    if "error" in document:
        return pb.Embedding(**document | {"error": pb.Error(**document["error"])})
    if "data" in document:
        document = document | {"data": bytes(document["data"])}
    return pb.Embedding(**document)


def chunks(model: Json, document: Json) -> Iterator[pb.EncodeChunk]:
    """One item in chunks: all fields in the first, index and data in later ones."""
    data = memoryview(document.get("data", b""))
    first = True
    for start in range(0, max(1, len(data)), CHUNK_BYTES):
        piece = data[start : start + CHUNK_BYTES]
        fields = document | {"data": piece} if first and len(data) else document
        message = (
            embedding(fields) if first else pb.Embedding(index=document["index"], data=bytes(piece))
        )
        yield pb.EncodeChunk(
            **(model if first else {}), embedding=message, last=start + CHUNK_BYTES >= len(data)
        )
        first = False
