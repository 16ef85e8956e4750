"""The API over gRPC, and the standard health service. Serve calls methods by their proto names.

An error is a status whose details are JSON: {"type", "message", "item", "retryable"}, and
"retry_after_s" if there is one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

import grpc
from grpc import ServicerContext as Context
from grpc_health.v1 import health_pb2

from actors.errors import InvalidRequest, ServiceError
from actors.telemetry.tracing import Origin
from encoder_service.api.answer import head
from encoder_service.api.errors import fault, request_id_of
from encoder_service.api.schema import RequestOptions, request_options
from encoder_service.intake.limits import check_body_bytes, check_items, offload
from encoder_service.ops.exchange import Exchange
from encoder_service.service import Service
from encoder_service.wire import encoder_pb2 as pb
from encoder_service.wire.documents import KWARGS, RequestItem, parse_item
from encoder_service.wire.formats import Document, WireError

CANCELLED = grpc.StatusCode.CANCELLED.name
CHUNK_BYTES = 2**20
MOST_DETAILS = 6000
"""Encoded characters of a status' details: gRPC accepts 8192 bytes of metadata per call."""

HEALTH_NAMES = ("", "encoder.v1.Encoder")
WATCH_SECONDS = 1.0
MOST_WATCHES = 4
"""At a time, because each occupies one of ingress.max_ongoing_requests and needs no token."""

Health = health_pb2.HealthCheckResponse
Message = TypeVar("Message", pb.Embedding, pb.Plan)


class Refused(Exception):
    """Ends a call whose status is already set: a stream, or a call without a valid token."""


class EncoderCalls:
    """The service encoder.v1.Encoder. Contexts are ray.serve.grpc_util.RayServegRPCContext."""

    service: Service

    async def Encode(self, request: pb.EncodeRequest, grpc_context: Context) -> pb.EncodeResponse:
        with self.answering("grpc", grpc_context) as exchange:
            with self.taken(request):
                items, options = read(request)
                document = await self.service.encode(items, options, exchange)
            size_bytes = sum(len(one.get("data", b"")) for one in document["items"])
            return await offload(size_bytes, response, document)
        return pb.EncodeResponse()

    async def EncodeStream(
        self, request: pb.EncodeRequest, grpc_context: Context
    ) -> AsyncIterator[pb.EncodeChunk]:
        """Each item as soon as it is ready, in chunks of about a megabyte."""
        with self.answering("grpc_stream", grpc_context) as exchange, self.taken(request):
            items, options = read(request)
            async with aclosing(self.service.stream(items, options, exchange)) as documents:
                async for document in documents:
                    for chunk in chunks(head(self.service.spec), document):
                        yield chunk
            return
        # Serve drops the status of a stream that ends without an exception.
        raise Refused

    async def Plan(self, request: pb.EncodeRequest, grpc_context: Context) -> pb.PlanResponse:
        with self.answering("grpc_plan", grpc_context) as exchange:
            with self.taken(request, encoding=False):
                items, options = read(request)
                document = await self.service.plan(items, options, exchange)
            plans = [item_message(pb.Plan, one) for one in document.pop("items")]
            return pb.PlanResponse(items=plans, **document)
        return pb.PlanResponse()

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

    @contextmanager
    def taken(self, request: pb.EncodeRequest, *, encoding: bool = True) -> Iterator[None]:
        """Counts the request's bytes while it is encoded or planned.

        Raises TooLarge before items are read, because millions of them may be empty; Overloaded if
        too many bytes are held or, if it is for `encoding`, the router is full.
        """
        check_items(len(request.items), self.service.limits)
        size_bytes: int = request.ByteSize()
        check_body_bytes(size_bytes, self.service.limits)
        if encoding:
            self.service.backend.check_room()
        with self.service.buffered.hold() as take:
            take(size_bytes)
            yield

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
                document = problem.document()
                if (wait := problem.retry_after_seconds) is not None:
                    document["retry_after_s"] = wait
                    context.set_trailing_metadata([*trailing, ("retry-after", f"{wait:g}")])
                context.set_code(problem.row.code)
                context.set_details(details(document))
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


def details(document: Document) -> str:
    """An error as JSON, its message cut to fit. gRPC encodes a percent sign as three bytes."""
    text = json.dumps(document)
    while len(text) + 2 * text.count("%") > MOST_DETAILS:
        document = document | {"message": document["message"][: len(document["message"]) // 2]}
        text = json.dumps(document)
    return text


def read(request: pb.EncodeRequest) -> tuple[list[RequestItem], RequestOptions]:
    given: dict[str, Any] = {field.name: value for field, value in request.options.ListFields()}
    return [request_item(i, one) for i, one in enumerate(request.items)], request_options(given)


def request_item(index: int, one: pb.Item) -> RequestItem:
    """Checked as an item of an HTTP request is. Raises InvalidRequest."""
    given: Document = {"type": one.type or "image"}
    given |= {name: getattr(one, name) or None for name in KWARGS}
    source = one.WhichOneof("source")
    if source == "frames":
        given |= {"frames": list(one.frames.data), "fps": one.frames.fps or one.fps or None}
    elif source:
        given[source] = getattr(one, source)
    try:
        return parse_item(given, f"items[{index}]")
    except WireError as error:
        raise InvalidRequest(str(error)) from None


def response(document: Document) -> pb.EncodeResponse:
    return pb.EncodeResponse(
        model=document["model"],
        family=document["family"],
        weights=document["weights"],
        items=[item_message(pb.Embedding, one) for one in document["items"]],
        timings=pb.Timings(**document["timings"]),
    )


def item_message(kind: type[Message], document: Document) -> Message:
    """An item of a response as pb.Embedding or pb.Plan."""
    if "error" in document:
        return kind(**document | {"error": pb.Error(**document["error"])})
    if "data" in document:
        document = document | {"data": bytes(document["data"])}
    return kind(**document)


def chunks(model: Document, document: Document) -> Iterator[pb.EncodeChunk]:
    """One item in chunks: all fields in the first, index and data in later ones."""
    data = memoryview(document.get("data", b""))
    fields = document
    for start in range(0, max(1, len(data)), CHUNK_BYTES):
        end = start + CHUNK_BYTES
        if len(data):
            fields = fields | {"data": data[start:end]}
        yield pb.EncodeChunk(
            **model, embedding=item_message(pb.Embedding, fields), last=end >= len(data)
        )
        model, fields = {}, {"index": document["index"]}
