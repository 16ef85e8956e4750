"""The gRPC service of encoder.proto: a stub for callers, handlers for servers, messages with rows.

Built from the descriptor, so that only the messages (encoder_pb2.py) are generated code. Servers do
not copy rows into messages, and callers do not copy them out: `packed` and `unpacked` write and
read the one field that holds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from encoder_service.wire import encoder_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["Encoder"]

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Wire types of protobuf."""
ITEMS = pb.EncodeResponse.ITEMS_FIELD_NUMBER << 3 | BYTES  # EncodeChunk's embedding has the same
DATA = pb.Embedding.DATA_FIELD_NUMBER << 3 | BYTES
"""Keys of fields: one byte each."""

CHUNK_KEY = "chunk-bytes"
"""Metadata key of EncodeStream and Fetch: maximum bytes of rows in a chunk."""
SMALLEST_CHUNK_BYTES, LARGEST_CHUNK_BYTES = 2**16, 7 * 2**19
"""Range of its value. By default a gRPC client refuses messages over 4 MiB."""


class EncoderStub:
    """Calls over a channel of grpc or grpc.aio, one per method of the service."""

    Encode: Any
    EncodeStream: Any
    Plan: Any
    Fetch: Any
    GetPlace: Any
    Release: Any
    GetModel: Any

    def __init__(self, channel: Any, *, raw: bool = False) -> None:
        """`raw`: messages are received as bytes, for `unpacked`."""
        for method in SERVICE.methods:
            make = channel.unary_stream if method.server_streaming else channel.unary_unary
            call = make(
                f"/{SERVICE.full_name}/{method.name}",
                request_serializer=GetMessageClass(method.input_type).SerializeToString,
                response_deserializer=(
                    None if raw else GetMessageClass(method.output_type).FromString
                ),
            )
            setattr(self, method.name, call)


def add_EncoderServicer_to_server(servicer: Any, server: Any) -> None:
    """Registers an object that has the service's methods. They return messages, or their bytes."""
    handlers = {}
    for method in SERVICE.methods:
        make = (
            grpc.unary_stream_rpc_method_handler
            if method.server_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        handlers[method.name] = make(
            getattr(servicer, method.name),
            request_deserializer=GetMessageClass(method.input_type).FromString,
            response_serializer=serialized,
        )
    generic = grpc.method_handlers_generic_handler(SERVICE.full_name, handlers)
    server.add_generic_rpc_handlers((generic,))


def serialized(message: Any) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


def packed(outer: Any, items: Iterable[tuple[pb.Embedding, Any]]) -> bytes:
    """Serializes an EncodeResponse or EncodeChunk, given without embeddings, together with
    embeddings and their rows.

    Rows are buffers. They are copied once, into the result.
    """
    pieces = [outer.SerializeToString()]
    for embedding, data in items:
        inner, view = embedding.SerializeToString(), memoryview(data).cast("B")
        if len(view):
            inner += bytes((DATA,)) + varint(len(view))
        pieces += [bytes((ITEMS,)), varint(len(inner) + len(view)), inner, view]
    return b"".join(pieces)


def unpacked(kind: Any, message: bytes) -> tuple[Any, list[tuple[pb.Embedding, memoryview]]]:
    """The inverse of `packed`: the message without embeddings, the embeddings without rows, and
    views of the rows in `message`. Raises DecodeError."""
    others, items = [], []
    for key, whole, content in fields(memoryview(message)):
        if key != ITEMS:
            others.append(whole)
            continue
        rest, data = [], memoryview(b"")
        for inner_key, part, value in fields(content):
            if inner_key == DATA:
                data = value
            else:
                rest.append(part)
        items.append((pb.Embedding.FromString(b"".join(rest)), data))
    return kind.FromString(b"".join(others)), items


def fields(message: memoryview) -> Iterator[tuple[int, memoryview, memoryview]]:
    """(Key, whole, content) of each field. Raises DecodeError."""
    at = 0
    while at < len(message):
        start = at
        key, at = read_varint(message, at)
        wire_type = key & 7
        if wire_type == VARINT:
            _, end = read_varint(message, at)
        elif wire_type == BYTES:
            length, at = read_varint(message, at)
            end = at + length
        elif wire_type in (FIXED64, FIXED32):
            end = at + (8 if wire_type == FIXED64 else 4)
        else:
            raise DecodeError(f"a field of wire type {wire_type}")
        if end > len(message):
            raise DecodeError("a field is cut off")
        yield key, message[start:end], message[at:end]
        at = end


def varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def read_varint(message: memoryview, at: int) -> tuple[int, int]:
    """The number at a position, and the position after it."""
    value = 0
    for place, byte in enumerate(message[at : at + 10]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    raise DecodeError("a number is cut off")
