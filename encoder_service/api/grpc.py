"""The API over gRPC: the ingress' own server, with the standard health and reflection services."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from actors.errors import (
    DeadlineExceeded,
    InvalidOption,
    InvalidRequest,
    Overloaded,
    ServiceError,
    StartError,
)
from encoder_service.api.answer import head
from encoder_service.api.grpc_calls import ReadInterceptor, answering
from encoder_service.api.schema import RequestOptions, request_options
from encoder_service.config import IngressOptions
from encoder_service.intake.limits import Take, check_body_bytes, check_items, offload
from encoder_service.service import Service
from encoder_service.wire import encoder_pb2 as pb
from encoder_service.wire.documents import KWARGS, RequestItem, parse_item
from encoder_service.wire.encoder_grpc import (
    CHUNK_KEY,
    LARGEST_CHUNK_BYTES,
    SERVICE,
    SMALLEST_CHUNK_BYTES,
    add_EncoderServicer_to_server,
    packed,
)
from encoder_service.wire.formats import Document, WireError, without

CHUNK_BYTES = 2**20
"""Default chunk size. Clients whose allocator returns freed memory at once read larger chunks more
slowly."""
SEND_SECONDS = 30.0
"""A stream ends if its client does not take a chunk within this time."""

HEALTH_NAMES = ("", SERVICE.full_name)
WATCH_SECONDS = 1.0
MOST_WATCHES = 4
"""Maximum concurrent Watch calls, which are limited because they need no token."""

ENVELOPE_BYTES = 2**20
"""How much longer than limits.max_body_bytes a message may be, so that a body that is a little too
large gets our own error. gRPC refuses longer messages before they are in memory."""
CONNECTION_SECONDS = 600
"""Connections are closed after this time, so that clients open new ones. Otherwise ingresses that
start later would get none. Calls in progress finish first, however long they take."""
GRACE_SECONDS = 60.0  # added to limits.timeout_seconds when the server stops, to send answers
SERVER_OPTIONS = [
    ("grpc.so_reuseport", 1),  # all ingresses of a node share the port
    ("grpc.max_send_message_length", -1),  # limits.max_response_bytes
    ("grpc.max_connection_age_ms", CONNECTION_SECONDS * 1000),
    # Detects clients that hang or are gone: they neither answer pings nor take data.
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
    """Listens on ingress.grpc_host and grpc_port. At the end, calls in progress are still answered.

    `owner` identifies the service, whose ingresses on one machine share the port. Raises StartError
    if the port is taken by another service or program.
    """
    with claim(options, owner):
        async with listening(service, options):
            yield


@contextmanager
def claim(options: IngressOptions, owner: str) -> Iterator[None]:
    """Claims the port. Raises StartError if another service of this user has it, because the kernel
    would divide connections between both (SO_REUSEPORT).

    The claim is the name of an abstract unix socket, which disappears with its process.
    /proc/net/unix lists all of them in a network namespace. Linux only.
    """
    if not PROC_UNIX.exists():
        yield
        return
    host, port = options.grpc_host[:40], str(options.grpc_port)
    mark = sha256(owner.encode()).hexdigest()[:16]
    with socket.socket(socket.AF_UNIX) as own:
        own.bind("\0" + "/".join((CLAIM, host, port, mark, token_hex(8))))
        # After `bind`, so that of two services that start together at least one sees the other.
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
    """Whether the hosts have an address in common, as far as their names tell."""
    return one == other or not {one, other}.isdisjoint(("0.0.0.0", "::"))


@asynccontextmanager
async def listening(service: Service, options: IngressOptions) -> AsyncIterator[None]:
    host = f"[{options.grpc_host}]" if ":" in options.grpc_host else options.grpc_host
    address = f"{host}:{options.grpc_port}"
    most_bytes = service.limits.max_body_bytes + ENVELOPE_BYTES
    health = HealthCalls(service)
    server = grpc.aio.server(
        interceptors=[ReadInterceptor(service, most_bytes, health.stopping)],
        options=[
            *SERVER_OPTIONS,
            ("grpc.max_receive_message_length", most_bytes),
            ("grpc.max_concurrent_streams", options.max_ongoing_requests),  # per connection
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
            f"cannot listen on {address}: another program may use the port. Set ingress.grpc_host "
            f"and ingress.grpc_port to a free one, or stop that program ({error})"
        ) from error
    await server.start()
    try:
        yield
    finally:
        health.stopping.set()
        await server.stop(service.limits.timeout_seconds + GRACE_SECONDS)


class EncoderCalls:
    """The service encoder.v1.Encoder."""

    def __init__(self, service: Service, most_calls: int) -> None:
        self.service = service
        self.most_calls = most_calls  # concurrent ones that may take long
        self.calls = 0

    async def Encode(self, request: pb.EncodeRequest, context: grpc.aio.ServicerContext) -> bytes:
        async with answering(self.service, "grpc", context) as exchange:
            with self.taken(request) as take:
                items, options = await read(request)
                document = await self.service.encode(items, options, exchange, take)
            size_bytes = sum(len(one.get("data", b"")) for one in document["items"])
            unsent = ExitStack()  # until the call has ended: gRPC keeps the message until then
            unsent.enter_context(self.service.unsent.hold())(size_bytes)
            context.add_done_callback(lambda _: unsent.close())
            message = await offload(size_bytes, response, document)
        return message

    async def EncodeStream(
        self, request: pb.EncodeRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Sends each item as soon as it is ready, in chunks."""
        async with answering(self.service, "grpc_stream", context) as exchange:
            most_bytes = chunk_bytes(context)
            with self.taken(request) as take:
                items, options = await read(request)
                async with aclosing(
                    self.service.stream(items, options, exchange, take)
                ) as documents:
                    async for document in documents:
                        await self.send(document, context, most_bytes)

    async def Plan(
        self, request: pb.EncodeRequest, context: grpc.aio.ServicerContext
    ) -> pb.PlanResponse:
        async with answering(self.service, "grpc_plan", context) as exchange:
            with self.taken(request, encoding=False) as take:
                items, options = await read(request)
                document = await self.service.plan(items, options, exchange, take)
            plans = [item_message(pb.Plan, one) for one in document.pop("items")]
        return pb.PlanResponse(items=plans, **document)

    async def Fetch(self, request: pb.FetchRequest, context: grpc.aio.ServicerContext) -> None:
        """Sends the embedding kept under an id, in chunks as EncodeStream does."""
        async with answering(self.service, None, context) as exchange:
            most_bytes = chunk_bytes(context)
            with self.counted():
                document = await self.service.fetch(request.reference, exchange.request_id)
                await self.send(document["items"][0], context, most_bytes)

    async def GetPlace(
        self, request: pb.GetPlaceRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetPlaceResponse:
        async with answering(self.service, None, context):
            place = await self.service.place(request.reference)
        return pb.GetPlaceResponse(**asdict(place))

    async def Release(
        self, request: pb.ReleaseRequest, context: grpc.aio.ServicerContext
    ) -> pb.ReleaseResponse:
        async with answering(self.service, None, context):
            await self.service.release(request.reference)
        return pb.ReleaseResponse()

    async def GetModel(
        self, request: pb.GetModelRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelResponse:
        return pb.GetModelResponse(json=json.dumps(self.service.model()))

    async def send(
        self, document: Document, context: grpc.aio.ServicerContext, most_bytes: int
    ) -> None:
        """Sends an item's chunks, each when the client has room for it. Raises DeadlineExceeded."""
        for chunk in chunks(head(self.service.spec), document, most_bytes):
            try:
                async with asyncio.timeout(SEND_SECONDS):
                    await context.write(chunk)
            except TimeoutError:
                raise DeadlineExceeded(
                    f"the client has read nothing for {SEND_SECONDS:g} s: read the stream as it "
                    "comes, or ask for ids with options.reference"
                ) from None

    @contextmanager
    def taken(self, request: pb.EncodeRequest, *, encoding: bool = True) -> Iterator[Take]:
        """Counts the request's bytes, and those fetched for it, while it is encoded or planned.

        Raises TooLarge before items are read, because millions of them may be empty. Raises
        Overloaded if too many calls are in progress, if too many bytes are held or, for `encoding`,
        if the router is full.
        """
        check_items(len(request.items), self.service.limits)
        size_bytes: int = request.ByteSize()
        check_body_bytes(size_bytes, self.service.limits)
        if encoding:
            self.service.backend.check_room()
        with self.counted(), self.service.buffered.hold() as take:
            take(size_bytes)
            yield take

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts a call. Raises Overloaded if too many are in progress."""
        if self.calls >= self.most_calls:
            raise Overloaded(
                f"{self.calls} calls in progress (ingress.max_ongoing_requests): try again later"
            )
        self.calls += 1
        try:
            yield
        finally:
            self.calls -= 1


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
        """Yields the status, and every change of it, until the client leaves.

        RESOURCE_EXHAUSTED beyond MOST_WATCHES; SERVICE_UNKNOWN for an unknown service.
        """
        if request.service not in HEALTH_NAMES:
            yield Health(status=Health.SERVICE_UNKNOWN)
            return
        if self.watches >= MOST_WATCHES:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{MOST_WATCHES} clients watch already: call Check instead",
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


def chunk_bytes(context: grpc.aio.ServicerContext) -> int:
    """Maximum bytes of rows in a chunk of this call. Raises InvalidOption."""
    given = str(dict(context.invocation_metadata() or ()).get(CHUNK_KEY, CHUNK_BYTES))
    asked = int(given) if given.isdecimal() and len(given) < 10 else 0
    if not SMALLEST_CHUNK_BYTES <= asked <= LARGEST_CHUNK_BYTES:
        raise InvalidOption(
            f"metadata {CHUNK_KEY}: must be a number from {SMALLEST_CHUNK_BYTES} to "
            f"{LARGEST_CHUNK_BYTES}, not {given[:40]!r}"
        )
    return asked


async def read(request: pb.EncodeRequest) -> tuple[list[RequestItem], RequestOptions]:
    given: dict[str, Any] = {field.name: value for field, value in request.options.ListFields()}
    items = await offload(
        sum(len(one.url) for one in request.items),  # data URLs, whose base64 is decoded
        lambda: [request_item(i, one) for i, one in enumerate(request.items)],
    )
    return items, request_options(given)


def request_item(index: int, one: pb.Item) -> RequestItem:
    """An item, checked like an item of an HTTP request. Raises InvalidRequest."""
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


def chunks(model: Document, document: Document, most_bytes: int) -> Iterator[bytes]:
    """One item as EncodeChunks: the first has all fields, later ones only index and data."""
    data = memoryview(document.get("data", b""))
    item = item_message(pb.Embedding, without(document, "data", "timings"))
    timings = pb.Timings(**document.get("timings", {}))
    for start in range(0, max(1, len(data)), most_bytes):
        end = start + most_bytes
        last = end >= len(data)
        outer = pb.EncodeChunk(**model, last=last, timings=timings if last else None)
        yield packed(outer, [(item, data[start:end])])
        model, item = {}, pb.Embedding(index=document["index"])
