"""Converts between dataclasses of the service and messages of replica.proto.

Fields are converted by name, so a new field only needs a line in the .proto;
tests/unit/router/test_codec.py compares the two. References to Ray's shared memory never enter a
message, because one that is serialised outside of Ray is never released.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

from actors import errors
from actors.errors import EncodeFailed, Overloaded, ServiceError
from actors.rpc import replica_pb2 as pb
from actors.store.kept import Kept
from actors.telemetry.tracing import Origin
from actors.types import Answer, Bytes, Dtype, Embedding, Media, Reply, SharedBytes

VERSION = 7  # of the protocol. Routers use no replica that has another one

EMBEDDING_FIELDS = [field.name for field in fields(Embedding) if field.name != "data"]

Data = Bytes | SharedBytes
"""The rows of an embedding."""
Fields = dict[str, Any]
"""The fields of a message. Nested messages are dictionaries too, because a message object would be
copied."""

Value = TypeVar("Value")

ERROR_TYPES = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, ServiceError)
}


@dataclass(frozen=True, slots=True)
class EncodeCall:
    """The arguments of `Encoder.encode`."""

    media: list[Media]
    dtype: Dtype
    timeout_seconds: float
    origin: Origin
    keep: bool
    waiting_per_sent: float = 0
    early: bool = False
    borrower: int = 0
    """The router's process, which reads rows in place. 0: it cannot."""
    tell: bool = False
    """Not an argument of it. RouterStream sends this router Load messages from now on."""


@dataclass(frozen=True, slots=True)
class ReceivedRows:
    """The rows of a message's embeddings that are not in the message: see server.SentRows."""

    shared: Sequence[SharedBytes] = ()  # those of its ticket
    lent: Sequence[Bytes] = ()  # those of its loans

    def of(self, embedding: pb.Embedding) -> Data:
        if embedding.HasField("shared"):
            return self.shared[int(embedding.shared)]
        if embedding.HasField("lent"):
            return self.lent[int(embedding.lent)]
        return np.frombuffer(embedding.data, np.uint8)


def message_fields(value: Any) -> Any:
    """A dataclass as the keyword arguments of its message, recursively; None stays absent."""
    kind: Any = type(value)
    if names := _field_names(kind):
        return {
            name: message_fields(found)
            for name in names
            if (found := getattr(value, name)) is not None
        }
    if isinstance(value, list):
        return [message_fields(one) for one in value]
    return value


@cache
def _field_names(kind: type) -> list[str]:
    return [field.name for field in fields(kind)] if is_dataclass(kind) else []


def from_message(message: Any, kind: type[Value]) -> Value:
    """The inverse of message_fields."""
    cached: Any = kind
    return kind(**{name: read(message) for name, read in _readers(cached)})


@cache
def _readers(kind: type) -> list[tuple[str, Callable[[Any], Any]]]:
    hints = get_type_hints(kind)
    return [(field.name, _reader(field.name, hints[field.name])) for field in fields(kind)]


def _reader(name: str, hint: Any) -> Callable[[Any], Any]:
    arguments = get_args(hint)
    if NoneType in arguments:
        (inner,) = (one for one in arguments if one is not NoneType)
        read = _reader(name, inner)
        return lambda message: read(message) if message.HasField(name) else None
    if get_origin(hint) is list:
        return lambda message: [from_message(one, arguments[0]) for one in getattr(message, name)]
    if get_origin(hint) is tuple:
        return lambda message: tuple(getattr(message, name))
    if isinstance(hint, type) and is_dataclass(hint):
        return lambda message: from_message(getattr(message, name), hint)
    return lambda message: getattr(message, name)


def reply_fields(reply: Reply, put: Callable[[Any], Fields]) -> Fields:
    """The message's fields, without those for the rows of all answers. `put`: see
    embedding_fields."""
    answers = [
        {"embedding": embedding_fields(one, put)}
        if isinstance(one, Embedding)
        else {"error": error_fields(one)}
        for one in reply.answers
    ]
    return {
        "answers": answers,
        "outstanding_patches": reply.outstanding_patches,
        "outstanding_pairs": reply.outstanding_pairs,
        "places": reply.places,
    }


def reply_of(message: pb.EncodeReply, rows: ReceivedRows) -> Reply:
    """The inverse of reply_fields."""
    answers: list[Answer] = [
        error_of(one.error) if one.HasField("error") else embedding_of(one.embedding, rows)
        for one in message.answers
    ]
    patches, pairs = message.outstanding_patches, message.outstanding_pairs
    return Reply(answers, patches, pairs, tuple(message.places))


def kept_fields(kept: Kept, put: Callable[[Any], Fields]) -> Fields:
    return {
        "media": message_fields(kept.media),
        "embedding": embedding_fields(kept.embedding, put),
    }


def kept_of(message: pb.Kept, rows: ReceivedRows) -> Kept:
    return Kept(from_message(message.media, Media), embedding_of(message.embedding, rows))


def embedding_fields(embedding: Embedding, put: Callable[[Any], Fields]) -> Fields:
    """`put`: returns the field that says where rows are."""
    others = {name: message_fields(getattr(embedding, name)) for name in EMBEDDING_FIELDS}
    return others | put(embedding.data)


def embedding_of(message: pb.Embedding, rows: ReceivedRows) -> Embedding:
    found = {name: read(message) for name, read in _readers(Embedding) if name != "data"}
    return Embedding(rows.of(message), **found)


def error_fields(error: Exception) -> Fields:
    """The message's fields for any error. One that is not a ServiceError becomes EncodeFailed."""
    if not isinstance(error, ServiceError):
        error = EncodeFailed(f"the encoder failed: {error!r}")
    retry = error.retry_after_seconds if isinstance(error, Overloaded) else 0.0
    return {
        "type": type(error).__name__,
        "message": error.message.encode("utf-8", "replace").decode(),  # without lone surrogates
        "retry_after_seconds": retry,
    }


def error_of(message: pb.Error) -> ServiceError:
    """The inverse of error_fields; EncodeFailed for a type that this version does not know."""
    kind = ERROR_TYPES.get(message.type, EncodeFailed)
    if issubclass(kind, Overloaded):
        return kind(message.message, message.retry_after_seconds)
    return kind(message.message)
