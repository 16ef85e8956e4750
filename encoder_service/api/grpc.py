"""The API over gRPC: methods that Serve calls by their names in encoder.proto.

Knows nothing of Ray but the context that Serve hands over. An error is a status whose details are
JSON: {"type", "message", "item", "retryable"}, and "retry_after_s" where there is one.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Protocol

import grpc

from actors.errors import InvalidRequest, TooLarge
from actors.telemetry.request_context import Origin
from encoder_service.api.answer import Json, head, item
from encoder_service.api.errors import Fault, fault
from encoder_service.api.exchange import Exchange
from encoder_service.api.request_id import request_id_of
from encoder_service.api.schema import RequestOptions, request_options
from encoder_service.config import LimitOptions
from encoder_service.ops.offload import offload
from encoder_service.service import Service
from encoder_service.wire import encoder_pb2 as pb
from encoder_service.wire.documents import RequestItem

CANCELLED = grpc.StatusCode.CANCELLED.name
CHUNK_BYTES = 2**20
MOST_DETAILS = 6000
"""Characters of a status as they travel: gRPC takes 8192 of metadata with a call."""


class Context(Protocol):
    """What is used of ray.serve.grpc_util.RayServegRPCContext."""

    def invocation_metadata(self) -> Sequence[tuple[str, str]]: ...
    def trailing_metadata(self) -> Sequence[tuple[str, str]]: ...
    def set_code(self, code: grpc.StatusCode) -> None: ...
    def set_details(self, details: str) -> None: ...
    def set_trailing_metadata(self, metadata: list[tuple[str, str]]) -> None: ...


class Refused(Exception):
    """Ends a stream, or a call without its token, whose status is already set."""


class EncoderCalls:
    """The service encoder.v1.Encoder."""

    service: Service

    async def Encode(self, request: pb.EncodeRequest, grpc_context: Context) -> pb.EncodeResponse:
        """All items at once."""
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
                async with aclosing(self.service.stream(items, options, exchange)) as entries:
                    async for entry in entries:
                        document = item(self.service.spec, entry, exchange.request_id)
                        for chunk in chunks(head(self.service.spec), document):
                            yield chunk
            return
        # Serve drops the status of a stream that ends without an exception.
        raise Refused

    async def Fetch(
        self, request: pb.FetchRequest, grpc_context: Context
    ) -> AsyncIterator[pb.EncodeChunk]:
        """What is kept under an id, in chunks as from EncodeStream."""
        with self.answering(None, grpc_context) as exchange:
            document = await self.service.fetch(request.reference, exchange.request_id)
            for chunk in chunks(head(self.service.spec), document["items"][0]):
                yield chunk
            return
        raise Refused

    async def Release(
        self, request: pb.ReleaseRequest, grpc_context: Context
    ) -> pb.ReleaseResponse:
        """Lets go of it."""
        with self.answering(None, grpc_context):
            await self.service.release(request.reference)
        return pb.ReleaseResponse()

    async def GetModel(
        self, request: pb.GetModelRequest, grpc_context: Context
    ) -> pb.GetModelResponse:
        """The document of GET /v1/model."""
        with self.answering(None, grpc_context):
            return pb.GetModelResponse(json=json.dumps(self.service.card))
        return pb.GetModelResponse()

    def check(self, request: pb.EncodeRequest) -> int:
        """Its bytes. Raises TooLarge for what is never taken, then Overloaded for any now."""
        size_bytes = check_size(request, self.service.limits)
        self.service.backend.check_room()
        return size_bytes

    @contextmanager
    def answering(self, api: str | None, context: Context) -> Iterator[Exchange]:
        """Asks for the token, turns exceptions into a status, watches. `api` None: not counted."""
        metadata = dict(context.invocation_metadata())
        # Serve puts the client's id there, or one of its own.
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
                exchange.problem = fault(error, request_id)
                exchange.code = exchange.problem.row.code.name
                refuse(context, exchange.problem, trailing)
        if not begun:  # the block cannot be skipped otherwise
            raise Refused


def refuse(context: Context, problem: Fault, trailing: list[tuple[str, str]]) -> None:
    """Sets the status of a call. `trailing`: metadata that is told in any case."""
    wait = problem.retry_after_seconds
    document = problem.document() | ({} if wait is None else {"retry_after_s": wait})
    context.set_code(problem.row.code)
    context.set_details(details(document))
    if wait is not None:
        context.set_trailing_metadata([*trailing, ("retry-after", f"{wait:g}")])


def details(document: Json) -> str:
    """An error as ASCII, its message cut until it fits. gRPC writes a percent sign as three."""
    text = json.dumps(document)
    while len(text) + 2 * text.count("%") > MOST_DETAILS:
        document = document | {"message": document["message"][: len(document["message"]) // 2]}
        text = json.dumps(document)
    return text


def check_size(request: pb.EncodeRequest, limits: LimitOptions) -> int:
    """Its bytes. Raises TooLarge before an item is touched: there may be millions of empty ones."""
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
    """Items and options of a request that was counted. Raises InvalidRequest, InvalidOption."""
    given: dict[str, Any] = {field.name: value for field, value in request.options.ListFields()}
    return [request_item(i, one) for i, one in enumerate(request.items)], request_options(given)


def request_item(index: int, one: pb.Item) -> RequestItem:
    """An item as it is over HTTP."""
    kind = one.type or "image"
    if kind not in ("image", "video"):
        raise InvalidRequest(f'items[{index}].type must be "image" or "video", not {kind!r}')
    source = one.WhichOneof("source")
    if source is None:
        raise InvalidRequest(f"items[{index}] needs data, url or frames")
    if source == "frames":
        return frames_item(index, one)
    data, url = (one.data, None) if source == "data" else (None, one.url)
    return RequestItem("video" if kind == "video" else "image", data, url)


def frames_item(index: int, one: pb.Item) -> RequestItem:
    """A video that comes as a list of images."""
    if one.type != "video":
        raise InvalidRequest(f'items[{index}].frames: the type must be "video"')
    if not 0 <= one.frames.fps < math.inf:
        raise InvalidRequest(f"items[{index}].frames.fps must be above zero")
    return RequestItem("video", frames=tuple(one.frames.data), fps=one.frames.fps or None)


def response(document: Json) -> pb.EncodeResponse:
    """The response document as a message."""
    return pb.EncodeResponse(
        model=document["model"],
        family=document["family"],
        weights=document["weights"],
        items=[embedding(one) for one in document["items"]],
        timings=pb.Timings(**document["timings"]),
    )


def embedding(document: Json) -> pb.Embedding:
    """One item of the response document as a message."""
    if "error" in document:
        return pb.Embedding(**document | {"error": pb.Error(**document["error"])})
    if "data" in document:
        document = document | {"data": bytes(document["data"])}
    return pb.Embedding(**document)


def chunks(model: Json, document: Json) -> Iterator[pb.EncodeChunk]:
    """One item in pieces: all fields in the first, index and data in later ones."""
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
