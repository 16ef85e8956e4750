"""The API over gRPC: the ingress' own server, with the standard health and reflection services.

An error is a status whose details are JSON: {"type", "message", "item", "retryable"}, and
"retry_after_s" if there is one.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager, suppress
from hashlib import sha256
from inspect import isasyncgen
from pathlib import Path
from secrets import token_hex
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from actors.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    ServiceError,
    StartError,
    TooLarge,
    Unauthorized,
)
from actors.telemetry.tracing import Origin
from encoder_service.api.answer import head
from encoder_service.api.errors import fault, request_id_of
from encoder_service.api.schema import RequestOptions, request_options
from encoder_service.config import IngressOptions
from encoder_service.intake.limits import check_body_bytes, check_items, offload
from encoder_service.ops.exchange import Exchange
from encoder_service.service import Service
from encoder_service.wire import encoder_pb2 as pb
from encoder_service.wire.documents import KWARGS, RequestItem, parse_item
from encoder_service.wire.encoder_grpc import SERVICE, add_EncoderServicer_to_server, packed
from encoder_service.wire.formats import Document, WireError, without

CANCELLED = grpc.StatusCode.CANCELLED.name
CHUNK_BYTES = 2**20
SEND_SECONDS = 30.0
"""A chunk that the client has not taken by then ends its stream."""
MOST_DETAILS = 6000
"""Encoded characters of a status' details: gRPC accepts 8192 bytes of metadata per call."""

HEALTH_NAMES = ("", SERVICE.full_name)
WATCH_SECONDS = 1.0
MOST_WATCHES = 4
"""At a time, because they need no token."""

OPEN_BYTES, OPEN_READS, OPEN_SECONDS = 2**16, 4, 5.0
"""Messages of calls without a token: how large, how many are read at a time, and for how long. A
stream that sends none for that time ends; so does the oldest of them when others come."""

ENVELOPE_BYTES = 2**20
"""How much longer than limits.max_body_bytes a message may be, so that a body that is a little too
large gets our own error. gRPC refuses longer ones before they are in memory."""
CONNECTION_SECONDS = 600
"""Connections are closed after this time, and clients open another one: otherwise ingresses that
start later would get none. Calls under way get the time to end."""
GRACE_SECONDS = 60.0  # added to limits.timeout_seconds, for answers to be sent
SERVER_OPTIONS = [
    ("grpc.so_reuseport", 1),  # all ingresses of a node share the port
    ("grpc.max_send_message_length", -1),  # limits.max_response_bytes
    ("grpc.max_connection_age_ms", CONNECTION_SECONDS * 1000),
    # A client that stopped, or is gone, neither answers pings nor takes data.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
]

PROC_UNIX = Path("/proc/net/unix")
CLAIM = "encoder-service-grpc"

Health = health_pb2.HealthCheckResponse
Message = TypeVar("Message", pb.Embedding, pb.Plan)


@asynccontextmanager
async def serving(
    service: Service, options: IngressOptions, owner: str = ""
) -> AsyncIterator[None]:
    """Listens on ingress.grpc_host and grpc_port. Calls under way at the end are answered.

    `owner`: names the service; its ingresses on one machine share the port. Raises StartError if
    the port is taken by another service or program.
    """
    with claim(options, owner):
        async with listening(service, options):
            yield


@contextmanager
def claim(options: IngressOptions, owner: str) -> Iterator[None]:
    """Raises StartError while another service of this user has the port, which the kernel would
    divide between both (SO_REUSEPORT).

    The claim is the name of an abstract unix socket, which ends with its process. All of a network
    namespace are in /proc/net/unix. Linux only.
    """
    if not PROC_UNIX.exists():
        yield
        return
    host, port = options.grpc_host[:40], str(options.grpc_port)
    mark = sha256(owner.encode()).hexdigest()[:16]
    with socket.socket(socket.AF_UNIX) as own:
        own.bind("\0" + "/".join((CLAIM, host, port, mark, token_hex(8))))
        # After `bind`: of two that start at the same time at least one sees the other.
        for line in PROC_UNIX.read_text().splitlines():
            _, found, name = line.rpartition(f"@{CLAIM}/")
            there = name.split("/")
            if found and there[1:2] == [port] and there[2:3] != [mark] and shared(host, there[0]):
                raise StartError(
                    f"another service on this machine listens on port {port} (ingress.grpc_port): "
                    "give this one another port, or stop the other one"
                )
        yield


def shared(one: str, other: str) -> bool:
    """Whether listening on both hosts uses an address twice, as far as their names tell."""
    return one == other or not {one, other}.isdisjoint(("0.0.0.0", "::"))


@asynccontextmanager
async def listening(service: Service, options: IngressOptions) -> AsyncIterator[None]:
    host = f"[{options.grpc_host}]" if ":" in options.grpc_host else options.grpc_host
    address = f"{host}:{options.grpc_port}"
    seconds = service.limits.timeout_seconds + GRACE_SECONDS
    most_bytes = service.limits.max_body_bytes + ENVELOPE_BYTES
    health = HealthCalls(service)
    server = grpc.aio.server(
        interceptors=[Doorkeeper(service, most_bytes, health.stopping)],
        options=[
            *SERVER_OPTIONS,
            ("grpc.max_receive_message_length", most_bytes),
            ("grpc.max_concurrent_streams", options.max_ongoing_requests),  # of each connection
            ("grpc.max_connection_age_grace_ms", round(seconds * 1000)),
        ],
    )
    add_EncoderServicer_to_server(EncoderCalls(service, options.max_ongoing_requests), server)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    names = [SERVICE.full_name, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name]
    reflection.enable_server_reflection([*names, reflection.SERVICE_NAME], server)
    try:
        server.add_insecure_port(address)
    except RuntimeError as error:
        raise StartError(
            f"cannot listen on {address} (ingress.grpc_host, ingress.grpc_port): {error}"
        ) from error
    await server.start()
    try:
        yield
    finally:
        health.stopping.set()
        await server.stop(seconds)


class Doorkeeper(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Bounds what is in memory before a call counts: gRPC reads each message as a whole.

    Calls to encoder.v1.Encoder need a valid token before their message is read. Those to the other
    services need none: fewer are read at a time, and only small messages are accepted, as of calls
    that send no media.
    All handlers become streaming ones, because gRPC reads the message before it calls others.
    """

    def __init__(self, service: Service, most_bytes: int, stopping: asyncio.Event) -> None:
        """`most_bytes`: of the largest message that gRPC accepts. `stopping`: ends streams."""
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
            """The call's message; None at the end of a stream. Refuses the call otherwise."""
            problem: ServiceError
            try:
                if error:
                    raise error
                raw = await reads.read(context)
                if raw is grpc.aio.EOF and handler.request_streaming:
                    return None
                if raw is grpc.aio.EOF:
                    raise InvalidRequest("the call has no message")
                if len(raw) > most_bytes:
                    raise TooLarge(f"the message is over {most_bytes} bytes")
                return handler.request_deserializer(raw)
            except DecodeError:
                problem = InvalidRequest("the message cannot be read: is it of another .proto?")
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
    """How many messages are read at a time, and for how long. One connection reads half of them."""

    def __init__(self, at_once: int, seconds: float) -> None:
        self.seconds = seconds
        self.each = max(1, at_once // 2)
        self.all = asyncio.Semaphore(max(1, at_once))
        self.peers = WeakValueDictionary[str, asyncio.Semaphore]()

    async def read(self, context: grpc.aio.ServicerContext) -> Any:
        """The next message, as bytes, or EOF. Raises DeadlineExceeded."""
        peer = self.peers.setdefault(context.peer(), asyncio.Semaphore(self.each))
        try:
            async with asyncio.timeout(self.seconds), peer, self.all:
                return await context.read()
        except TimeoutError:
            raise DeadlineExceeded(
                f"the message did not arrive within {self.seconds:g} s"
            ) from None


class OpenReads:
    """Reads messages of calls without a token or media.

    One more than OPEN_READS ends the oldest, because callers that send nothing cost nothing, and
    would otherwise keep health checks waiting.
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


class EncoderCalls:
    """The service encoder.v1.Encoder."""

    def __init__(self, service: Service, most_calls: int) -> None:
        self.service = service
        self.most_calls = most_calls  # at a time: those that may take long
        self.calls = 0

    async def Encode(self, request: pb.EncodeRequest, context: grpc.aio.ServicerContext) -> bytes:
        async with answering(self.service, "grpc", context) as exchange:
            with self.taken(request):
                items, options = read(request)
                document = await self.service.encode(items, options, exchange)
            size_bytes = sum(len(one.get("data", b"")) for one in document["items"])
            unsent = ExitStack()  # until the call has ended: gRPC keeps the message until then
            unsent.enter_context(self.service.unsent.hold())(size_bytes)
            context.add_done_callback(lambda _: unsent.close())
            message = await offload(size_bytes, response, document)
        return message

    async def EncodeStream(
        self, request: pb.EncodeRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Each item as soon as it is ready, in chunks of about a megabyte."""
        async with answering(self.service, "grpc_stream", context) as exchange:
            with self.taken(request):
                items, options = read(request)
                async with aclosing(self.service.stream(items, options, exchange)) as documents:
                    async for document in documents:
                        await self.send(document, context)

    async def Plan(
        self, request: pb.EncodeRequest, context: grpc.aio.ServicerContext
    ) -> pb.PlanResponse:
        async with answering(self.service, "grpc_plan", context) as exchange:
            with self.taken(request, encoding=False):
                items, options = read(request)
                document = await self.service.plan(items, options, exchange)
            plans = [item_message(pb.Plan, one) for one in document.pop("items")]
        return pb.PlanResponse(items=plans, **document)

    async def Fetch(self, request: pb.FetchRequest, context: grpc.aio.ServicerContext) -> None:
        """The embedding that is kept under an id, in chunks as from EncodeStream."""
        async with answering(self.service, None, context) as exchange:
            with self.counted():
                document = await self.service.fetch(request.reference, exchange.request_id)
                await self.send(document["items"][0], context)

    async def Release(
        self, request: pb.ReleaseRequest, context: grpc.aio.ServicerContext
    ) -> pb.ReleaseResponse:
        async with answering(self.service, None, context):
            await self.service.release(request.reference)
        return pb.ReleaseResponse()

    async def GetModel(
        self, request: pb.GetModelRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelResponse:
        return pb.GetModelResponse(json=json.dumps(self.service.card))

    async def send(self, document: Document, context: grpc.aio.ServicerContext) -> None:
        """An item's chunks, each when the client has room for it. Raises DeadlineExceeded."""
        for chunk in chunks(head(self.service.spec), document):
            try:
                async with asyncio.timeout(SEND_SECONDS):
                    await context.write(chunk)
            except TimeoutError:
                raise DeadlineExceeded(
                    f"the client has read nothing for {SEND_SECONDS:g} s: read the stream as it "
                    "comes, or ask for ids with options.reference"
                ) from None

    @contextmanager
    def taken(self, request: pb.EncodeRequest, *, encoding: bool = True) -> Iterator[None]:
        """Counts the request's bytes while it is encoded or planned.

        Raises TooLarge before items are read, because millions of them may be empty; Overloaded if
        too many calls or bytes are held or, if it is for `encoding`, the router is full.
        """
        check_items(len(request.items), self.service.limits)
        size_bytes: int = request.ByteSize()
        check_body_bytes(size_bytes, self.service.limits)
        if encoding:
            self.service.backend.check_room()
        with self.counted(), self.service.buffered.hold() as take:
            take(size_bytes)
            yield

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Raises Overloaded if too many calls are under way."""
        if self.calls >= self.most_calls:
            raise Overloaded(
                f"{self.calls} calls are under way here (ingress.max_ongoing_requests): come back "
                "later"
            )
        self.calls += 1
        try:
            yield
        finally:
            self.calls -= 1


COUNTED = {"Encode": "grpc", "EncodeStream": "grpc_stream", "Plan": "grpc_plan"}
"""The calls that the metrics count, and under which `api`."""


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
            if context.cancelled():  # the client left: nobody is told
                raise
            problem = fault(error, request_id)
        exchange.code = problem.row.code.name
        exchange.failed(problem.row.type, problem.message)
    document = problem.document()
    if (wait := problem.retry_after_seconds) is not None:
        document["retry_after_s"] = wait
        trailing.append(("retry-after", f"{wait:g}"))
    await context.abort(problem.row.code, details(document), tuple(trailing))


class HealthCalls:
    """The service grpc.health.v1.Health. Needs no token, because probes send none."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.watches = 0
        self.stopping = asyncio.Event()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """SERVING or NOT_SERVING; NOT_FOUND for an unknown service."""
        if request.service not in HEALTH_NAMES:
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"no service {request.service[:100]!r}; known are {HEALTH_NAMES}",
            )
        return Health(status=await self._serving())

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The status and every change of it, until the client leaves.

        RESOURCE_EXHAUSTED beyond MOST_WATCHES; SERVICE_UNKNOWN for an unknown service.
        """
        if request.service not in HEALTH_NAMES:
            yield Health(status=Health.SERVICE_UNKNOWN)
            return
        if self.watches >= MOST_WATCHES:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{MOST_WATCHES} others watch already: call Check instead",
            )
        self.watches += 1
        try:
            last = None
            while not self.stopping.is_set():
                status = await self._serving()
                if status != last:
                    yield Health(status=status)
                    last = status
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.stopping.wait(), WATCH_SECONDS)
            yield Health(status=Health.NOT_SERVING)
        finally:
            self.watches -= 1

    async def List(
        self, request: health_pb2.HealthListRequest, context: grpc.aio.ServicerContext
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
    given |= {name: getattr(one, name) for name in KWARGS if one.HasField(name)}
    source = one.WhichOneof("source")
    if source == "frames":
        given["frames"] = list(one.frames.data)
        if one.frames.HasField("fps"):
            given["fps"] = one.frames.fps
    elif source:
        given[source] = getattr(one, source)
    try:
        return parse_item(given, f"items[{index}]")
    except WireError as error:
        raise InvalidRequest(str(error)) from None


def response(document: Document) -> bytes:
    """The bytes of an EncodeResponse."""
    outer = pb.EncodeResponse(
        model=document["model"],
        family=document["family"],
        weights=document["weights"],
        timings=pb.Timings(**document["timings"]),
    )
    items = document["items"]
    return packed(
        outer,
        ((item_message(pb.Embedding, without(one, "data")), one.get("data", b"")) for one in items),
    )


def item_message(kind: type[Message], document: Document) -> Message:
    """An item of a response, without rows, as pb.Embedding or pb.Plan."""
    if "error" in document:
        return kind(**document | {"error": pb.Error(**document["error"])})
    return kind(**document)


def chunks(model: Document, document: Document) -> Iterator[bytes]:
    """One item as EncodeChunks: all fields in the first, index and data in later ones."""
    data = memoryview(document.get("data", b""))
    item = item_message(pb.Embedding, without(without(document, "data"), "timings"))
    timings = pb.Timings(**document.get("timings", {}))
    for start in range(0, max(1, len(data)), CHUNK_BYTES):
        end = start + CHUNK_BYTES
        last = end >= len(data)
        outer = pb.EncodeChunk(**model, last=last, timings=timings if last else None)
        yield packed(outer, [(item, data[start:end])])
        model, item = {}, pb.Embedding(index=document["index"])
