"""What a router and an encoder say to each other over a line: msgpack of our own types.

Fields are checked by pydantic as they come: what is no such message raises ValueError.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import msgpack
import numpy as np
from pydantic import TypeAdapter

from actors import errors
from actors.errors import EncodeFailed, ServiceError
from actors.telemetry.request_context import Origin
from actors.types import (
    Answer,
    Dtype,
    Embedding,
    Grid,
    Media,
    Reply,
    Source,
    Timings,
)


@dataclass(frozen=True, slots=True)
class Call:
    """Items to encode: the arguments of `Encoder.encode`."""

    media: list[Media]
    dtype: Dtype
    timeout_seconds: float
    origin: Origin
    keep: bool

    @property
    def arguments(self) -> tuple[list[Media], Dtype, float, Origin, bool]:
        """As `encode` takes them."""
        return self.media, self.dtype, self.timeout_seconds, self.origin, self.keep


@dataclass(frozen=True, slots=True)
class Asked:
    """A call by its number, which is of this connection alone; None: nobody waits for it now."""

    number: int
    call: Call | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """An error, by the name of its class."""

    name: str
    message: str


@dataclass(frozen=True, slots=True)
class Made:
    """An embedding, its rows in the message."""

    data: bytes
    dtype: Dtype
    shape: tuple[int, int]
    grid_thw: Grid
    source: Source
    timings: Timings
    replica: str
    frame_tokens: tuple[int, ...]
    reference: str


@dataclass(frozen=True, slots=True)
class Told:
    """What came of a call: its answers, in order, or one error for all."""

    number: int
    answers: list[Made | Failed] = field(default_factory=list)
    outstanding_patches: int = 0
    failed: Failed | None = None


NAMES = [each.name for each in fields(Made) if each.name != "data"]
"""What else an embedding has."""

ASKED, TOLD = TypeAdapter(Asked), TypeAdapter(Told)

KINDS = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, ServiceError)
}
"""Of errors, by their names."""


def asked_bytes(asked: Asked) -> bytes:
    """The message."""
    message: bytes = msgpack.packb(ASKED.dump_python(asked))
    return message


def asked_of(message: bytes) -> Asked:
    """The same again. Raises ValueError."""
    return ASKED.validate_python(msgpack.unpackb(message))


def told_bytes(number: int, outcome: Reply | Exception) -> bytes:
    """The message. What is no error of this service is said to be our fault."""
    if isinstance(outcome, Exception):
        told = Told(number, failed=failed(outcome))
    else:
        answers = [
            made(one) if isinstance(one, Embedding) else failed(one) for one in outcome.answers
        ]
        told = Told(number, answers, outcome.outstanding_patches)
    message: bytes = msgpack.packb(TOLD.dump_python(told))
    return message


def told_of(message: bytes) -> tuple[int, Reply | ServiceError]:
    """Number and outcome. Raises ValueError."""
    told = TOLD.validate_python(msgpack.unpackb(message))
    if told.failed:
        return told.number, error_of(told.failed)
    answers: list[Answer] = [
        embedding_of(one) if isinstance(one, Made) else error_of(one) for one in told.answers
    ]
    return told.number, Reply(answers, told.outstanding_patches)


def made(embedding: Embedding) -> Made:
    """Of an embedding whose rows are in this process, or kept."""
    data = embedding.data
    if not isinstance(data, np.ndarray):
        raise TypeError(
            f"rows that are {type(data).__name__} do not go over a line. This is a bug."
        )
    return Made(data.tobytes(), **{name: getattr(embedding, name) for name in NAMES})


def embedding_of(made: Made) -> Embedding:
    """The same again."""
    data = np.frombuffer(made.data, np.uint8)
    return Embedding(data, **{name: getattr(made, name) for name in NAMES})


def failed(error: Exception) -> Failed:
    """Of any error."""
    if isinstance(error, ServiceError):
        return Failed(type(error).__name__, error.message)
    return Failed(EncodeFailed.__name__, f"the encoder failed: {error!r}")


def error_of(failed: Failed) -> ServiceError:
    """The same again."""
    return KINDS.get(failed.name, EncodeFailed)(failed.message)
