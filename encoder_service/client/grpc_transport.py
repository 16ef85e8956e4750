"""A client's calls over gRPC. The answers are the same documents as over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from encoder_service.client.items import ServiceError, service_error
from encoder_service.wire import encoder_pb2 as pb
from encoder_service.wire.documents import RequestItem
from encoder_service.wire.encoder_grpc import EncoderStub
from encoder_service.wire.formats import Document

CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # By default up to two minutes, during which every call fails with the last error.
    ("grpc.max_reconnect_backoff_ms", 2000),
]


class GrpcTransport:
    """One grpc.aio channel; grpcs:// with TLS."""

    def __init__(self, url: str, token: str | None, timeout_seconds: float) -> None:
        parts = urlsplit(url)
        if parts.scheme == "grpcs":
            tls = grpc.ssl_channel_credentials()
            self.channel = grpc.aio.secure_channel(parts.netloc, tls, CHANNEL_OPTIONS)
        else:
            self.channel = grpc.aio.insecure_channel(parts.netloc, CHANNEL_OPTIONS)
        self.stub = EncoderStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)
        self.settings: dict[str, Any] = {
            "timeout": timeout_seconds,
            "metadata": (("authorization", f"Bearer {token}"),) if token else (),
        }

    async def encode(self, items: list[RequestItem], options: dict[str, Any]) -> Document:
        answer = await self.call(self.stub.Encode, request_of(items, options))
        found = [item_document(item) for item in answer.items]
        return document_of(answer) | {"items": found, "timings": document_of(answer.timings)}

    async def plan(self, items: list[RequestItem], options: dict[str, Any]) -> Document:
        answer = await self.call(self.stub.Plan, request_of(items, options))
        return document_of(answer) | {"items": [item_document(item) for item in answer.items]}

    async def fetch(self, reference: str) -> Document:
        request = pb.FetchRequest(reference=reference)
        with service_errors():
            chunks = [chunk async for chunk in self.stub.Fetch(request, **self.settings)]
        if not chunks:
            raise ServiceError("invalid_response", "the service sent an empty stream")
        first = chunks[0]
        data = b"".join(chunk.embedding.data for chunk in chunks)
        item = item_document(first.embedding) | {"data": data}
        return document_of(first) | {"items": [item], "timings": {}}

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
        await self.channel.close()

    async def call(self, method: Any, request: Any) -> Any:
        with service_errors():
            return await method(request, **self.settings)


@contextmanager
def service_errors() -> Iterator[None]:
    """Raises a gRPC status as ServiceError. The details of the service's own statuses are JSON."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        code, details = error.code(), error.details() or ""
        try:
            document = dict(json.loads(details))
        except (ValueError, TypeError):
            document = {
                "type": code.name.lower(),
                "message": details,
                "retryable": code is grpc.StatusCode.UNAVAILABLE,
            }
        raise service_error(document, code.name, document.get("retry_after_s")) from error


def request_of(items: list[RequestItem], options: dict[str, Any]) -> pb.EncodeRequest:
    parts = [message(item) for item in items]
    return pb.EncodeRequest(items=parts, options=pb.Options(**options))


def message(item: RequestItem) -> pb.Item:
    if item.frames is None:
        return pb.Item(**item.document())
    frames = pb.Frames(data=item.frames, fps=item.fps or 0)
    return pb.Item(type=item.type, frames=frames, **item.kwargs())


def item_document(item: Any) -> Document:
    """A message Embedding or Plan as the item that HTTP would give."""
    error = {"error": document_of(item.error)} if item.HasField("error") else {}
    return document_of(item) | error


def document_of(message: Any) -> Document:
    """Every field of a message that is no message, also those that are zero."""
    return {
        field.name: getattr(message, field.name)
        for field in message.DESCRIPTOR.fields
        if field.message_type is None
    }
