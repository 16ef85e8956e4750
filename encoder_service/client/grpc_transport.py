"""A client's calls over gRPC. The answers are the same documents as over HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc

from encoder_service.client.items import ServiceError, check_each, service_error
from encoder_service.wire import encoder_pb2 as pb
from encoder_service.wire.documents import RequestItem
from encoder_service.wire.encoder_grpc import CHUNK_KEY, LARGEST_CHUNK_BYTES, EncoderStub, unpacked
from encoder_service.wire.formats import Document, without

CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # By default up to two minutes, during which every call fails with the last error.
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.use_local_subchannel_pool", 1),  # channels share no connections
]
CONNECTIONS = 4
"""Maximum connections, if calls overlap. Each is to one ingress, which sends with one CPU core."""

TOO_LARGE = re.compile(r"SERVER: Received message larger than max \((\d+) vs\. (\d+)\)")
"""The error for a message that gRPC refuses before the service sees it."""
NO_CONNECTION = ("failed to connect to all addresses", "DNS resolution failed")  # gRPC's words


class GrpcTransport:
    """Calls over channels of grpc.aio, with TLS for grpcs://. Channels connect on first use."""

    def __init__(self, url: str, token: str | None, timeout_seconds: float) -> None:
        self.channels = [channel(url) for _ in range(CONNECTIONS)]
        self.calls = [0] * CONNECTIONS
        self.rows = [EncoderStub(one, raw=True) for one in self.channels]
        self.stub = EncoderStub(self.channels[0])
        self.health = health_pb2_grpc.HealthStub(self.channels[0])
        self.settings: dict[str, Any] = {
            "timeout": timeout_seconds,
            "metadata": (("authorization", f"Bearer {token}"),) if token else (),
        }
        chunks = (CHUNK_KEY, str(LARGEST_CHUNK_BYTES))
        self.in_large_chunks = self.settings | {"metadata": (*self.settings["metadata"], chunks)}
        """For several items, which then take less CPU time. Rows of a single one arrive sooner in
        the service's own, smaller chunks, because one is copied while the next is sent."""

    async def encode(self, items: list[RequestItem], options: dict[str, Any]) -> Document:
        """Encodes over a stream of small messages, because one message with all rows would be
        copied many times."""
        if options.get("reference"):  # no rows
            return await self.encode_at_once(items, options)
        request = request_of(items, options)
        settings = self.in_large_chunks if len(items) > 1 else self.settings
        with self.least_busy() as rows:
            return await self.collect(rows.EncodeStream(request, **settings))

    async def encode_at_once(self, items: list[RequestItem], options: dict[str, Any]) -> Document:
        """The same with one message as the response."""
        request = request_of(items, options)
        with service_errors(), self.least_busy() as rows:
            message = await rows.Encode(request, **self.settings)
            answer, found = unpacked(pb.EncodeResponse, message)
        parts = [item_document(item) | {"data": bytes(data)} for item, data in found]
        return document_of(answer) | {"items": parts, "timings": document_of(answer.timings)}

    async def plan(self, items: list[RequestItem], options: dict[str, Any]) -> Document:
        answer = await self.call(self.stub.Plan, request_of(items, options))
        return document_of(answer) | {"items": [item_document(item) for item in answer.items]}

    async def embed(self, body: Document) -> Document:
        raise ServiceError("unimplemented", "embed needs HTTP: Client('http://HOST:PORT')")

    async def fetch(self, reference: str) -> Document:
        request = pb.FetchRequest(reference=reference)
        with self.least_busy() as rows:
            return await self.collect(rows.Fetch(request, **self.settings))

    async def place(self, reference: str) -> Document:
        request = pb.GetPlaceRequest(reference=reference)
        return document_of(await self.call(self.stub.GetPlace, request))

    async def release(self, reference: str) -> None:
        await self.call(self.stub.Release, pb.ReleaseRequest(reference=reference))

    async def model(self) -> Document:
        answer = await self.call(self.stub.GetModel, pb.GetModelRequest())
        document: Document = json.loads(answer.json)
        return document

    async def ready(self) -> bool:
        try:
            answer = await self.call(self.health.Check, health_pb2.HealthCheckRequest())
        except ServiceError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def close(self) -> None:
        for one in self.channels:
            await one.close()

    @contextmanager
    def least_busy(self) -> Iterator[EncoderStub]:
        """The first of the connections with the fewest calls."""
        place = self.calls.index(min(self.calls))
        self.calls[place] += 1
        try:
            yield self.rows[place]
        finally:
            self.calls[place] -= 1

    async def collect(self, call: Any) -> Document:
        """The document of a stream of EncodeChunks. Rows are copied once, to their final place."""
        head: Document = {}
        items: dict[int, Document] = {}
        rows: dict[int, list[memoryview]] = {}
        timings: dict[str, float] = {}
        with service_errors():
            async for message in call:
                chunk, ((item, data),) = unpacked(pb.EncodeChunk, message)
                head = head or document_of(chunk)
                if item.index not in items:
                    items[item.index], rows[item.index] = item_document(item), []
                elif item.index not in rows:
                    problem = f"item {item.index} comes twice in the service's stream"
                    raise ServiceError("invalid_response", problem)
                rows[item.index].append(data)
                if not chunk.last:
                    continue
                items[item.index]["data"] = b"".join(rows.pop(item.index))
                for name, value in document_of(chunk.timings).items():
                    timings[name] = max(value, timings.get(name, 0.0))
        if rows or not items:
            raise ServiceError("invalid_response", "the service's stream is empty, or cut off")
        return head | {"items": [items[index] for index in sorted(items)], "timings": timings}

    async def call(self, method: Any, request: Any) -> Any:
        with service_errors():
            return await method(request, **self.settings)


def channel(url: str) -> grpc.aio.Channel:
    """Raises ValueError for a URL without a host, or with a port that cannot be."""
    parts = urlsplit(url)
    if not parts.hostname or parts.port == 0:
        raise ValueError(f"{url!r}: the host is missing, or the port is 0")
    if parts.scheme == "grpcs":
        tls = grpc.ssl_channel_credentials()
        return grpc.aio.secure_channel(parts.netloc, tls, CHANNEL_OPTIONS)
    return grpc.aio.insecure_channel(parts.netloc, CHANNEL_OPTIONS)


@contextmanager
def service_errors() -> Iterator[None]:
    """Raises a gRPC status as ServiceError. The details of the service's own statuses are JSON."""
    try:
        yield
    except (DecodeError, ValueError) as error:
        message = f"not a response of this service: {error!r}"
        raise ServiceError("invalid_response", message) from None
    except grpc.aio.AioRpcError as error:
        code, details = error.code(), error.details() or ""
        try:
            document = dict(json.loads(details))
        except (ValueError, TypeError):
            document = document_of_grpc(code, details)
        raise service_error(document, code.name, document.get("retry_after_s")) from None


def document_of_grpc(code: grpc.StatusCode, details: str) -> Document:
    """An error of gRPC itself, in the form of the service's errors."""
    if found := TOO_LARGE.search(details):
        message = (
            f"the request has {found[1]} bytes, over the {found[2]} that the service takes in one "
            "message, a little more than its limits.max_body_bytes: send fewer or smaller items, "
            "or raise the limit"
        )
        return {"type": "too_large", "message": message}
    if "http1.x server" in details:  # gRPC's words
        details = (
            f"this port does not speak gRPC: is it the HTTP port (http://HOST:PORT)? ({details})"
        )
    elif any(words in details for words in NO_CONNECTION):
        details = f"no connection: is the service running there? ({details})"
    retryable = code is grpc.StatusCode.UNAVAILABLE
    return {"type": code.name.lower(), "message": details, "retryable": retryable}


def request_of(items: list[RequestItem], options: dict[str, Any]) -> pb.EncodeRequest:
    """Raises ServiceError for values that the message cannot hold."""
    try:
        parts = [message(item) for item in items]
        return pb.EncodeRequest(items=parts, options=pb.Options(**options))
    except (TypeError, ValueError) as error:
        check_each(options, "options", lambda name, value: pb.Options(**{name: value}))
        for index, item in enumerate(items):
            check_each(item.own(), f"items[{index}]", lambda name, value: pb.Item(**{name: value}))
        raise ServiceError("invalid_option", f"not sent: {error}") from error


def message(item: RequestItem) -> pb.Item:
    if item.frames is None:
        return pb.Item(**item.document())
    frames = pb.Frames(data=item.frames, fps=item.fps)
    return pb.Item(type=item.type, frames=frames, **without(item.own(), "fps"))


def item_document(item: Any) -> Document:
    """An Embedding or Plan message as the item of an HTTP response."""
    error = {"error": document_of(item.error)} if item.HasField("error") else {}
    return document_of(item) | error


def document_of(message: Any) -> Document:
    """Every field of a message that is not a message itself, including those that are zero."""
    return {
        field.name: getattr(message, field.name)
        for field in message.DESCRIPTOR.fields
        if field.message_type is None
    }
