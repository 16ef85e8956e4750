"""The error table: exception (actors/errors.py) -> wire type, HTTP status, gRPC code, retryable."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import grpc

from actors.errors import (
    DeadlineExceeded,
    EncodeFailed,
    InvalidOption,
    InvalidRequest,
    NotFound,
    Overloaded,
    ServiceError,
    TooLarge,
    Unauthorized,
    Unavailable,
    UnsupportedMedia,
)

log = logging.getLogger("ray.serve")

MOST_CHARACTERS = 1000
"""Limit for a message: it may quote the request, and gRPC carries it in a header."""

Code = grpc.StatusCode


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """How clients see one class of errors."""

    type: str
    status: int
    code: grpc.StatusCode
    retryable: bool


INTERNAL = ErrorRow("internal_error", 500, Code.INTERNAL, False)

TABLE: dict[type[ServiceError], ErrorRow] = {
    InvalidRequest: ErrorRow("invalid_request", 400, Code.INVALID_ARGUMENT, False),
    InvalidOption: ErrorRow("invalid_option", 422, Code.INVALID_ARGUMENT, False),
    UnsupportedMedia: ErrorRow("unsupported_media", 415, Code.INVALID_ARGUMENT, False),
    TooLarge: ErrorRow("too_large", 413, Code.INVALID_ARGUMENT, False),
    Unauthorized: ErrorRow("unauthorized", 401, Code.UNAUTHENTICATED, False),
    NotFound: ErrorRow("not_found", 404, Code.NOT_FOUND, False),
    # Decided by router/policy/ledger.py (patches in flight), intake/limits.py (bytes held) and, for
    # chats, Serve's queue (ChatFleet in ingress.py).
    Overloaded: ErrorRow("overloaded", 429, Code.RESOURCE_EXHAUSTED, True),
    DeadlineExceeded: ErrorRow("deadline_exceeded", 504, Code.DEADLINE_EXCEEDED, True),
    Unavailable: ErrorRow("unavailable", 503, Code.UNAVAILABLE, True),
    EncodeFailed: ErrorRow("encode_failed", 500, Code.INTERNAL, False),
}
"""A class without a row has that of its nearest ancestor."""


class AtItem(Exception):
    """The error of one item of a request, with the item's position."""

    def __init__(self, item: int, error: ServiceError) -> None:
        super().__init__(item, error)
        self.item = item
        self.error = error


@dataclass(frozen=True, slots=True)
class Fault:
    row: ErrorRow
    message: str
    item: int | None = None
    """Position of the item that caused it; None: the request as a whole."""
    retry_after_seconds: float | None = None

    def document(self) -> dict[str, Any]:
        """{"type", "message", "item", "retryable"}: the same in HTTP and gRPC."""
        return {
            "type": self.row.type,
            "message": self.message,
            "item": self.item,
            "retryable": self.row.retryable,
        }

    def openai_document(self, param: str | None = None) -> dict[str, Any]:
        """A body in OpenAI's shape: `param` and `code` beside our own keys."""
        return {"error": self.document() | {"param": param, "code": self.row.type}}


def fault(error: BaseException, request_id: str) -> Fault:
    """What the client is told. An unexpected exception is logged and becomes "internal_error"."""
    if isinstance(error, AtItem):
        inner = fault(error.error, request_id)
        return Fault(inner.row, inner.message, error.item, inner.retry_after_seconds)
    # Ray wraps what a deployment raises; `cause` is the original.
    cause = getattr(error, "cause", None)
    original = cause if isinstance(cause, ServiceError) else error
    row = row_of(type(original))
    if row is INTERNAL or not isinstance(original, ServiceError):
        log.error("request %s failed", request_id, exc_info=error)
        return Fault(INTERNAL, f"something went wrong here; request {request_id} is in the logs")
    wait = original.retry_after_seconds if isinstance(original, Overloaded) else None
    return Fault(row, original.message[:MOST_CHARACTERS], retry_after_seconds=wait)


def row_of(kind: type[BaseException]) -> ErrorRow:
    return next((TABLE[cls] for cls in kind.__mro__ if cls in TABLE), INTERNAL)


def row_of_status(status: int) -> ErrorRow:
    """The row of an error that the HTTP framework raised."""
    if status == 405:
        return ErrorRow("method_not_allowed", 405, Code.UNIMPLEMENTED, False)
    rows = (row for row in TABLE.values() if row.status == status)
    return next(rows, ErrorRow("invalid_request", status, Code.INVALID_ARGUMENT, False))
