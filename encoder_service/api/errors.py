"""Errors as clients see them: the table, and the HTTP middleware that responds with them."""

from __future__ import annotations

import logging
import math
import re
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actors import errors
from actors.errors import Overloaded, ServiceError
from actors.telemetry.tracing import LOG, Origin
from encoder_service.intake.limits import Buffered
from encoder_service.ops.exchange import Exchange, Observer

log = logging.getLogger(LOG)

MOST_CHARACTERS = 1000
"""Limit for a message, because it may quote the request, and gRPC carries it in a header."""

CLIENT_GONE = "499"  # nginx's code for a client that hung up: only the metrics see it

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
    errors.InvalidRequest: ErrorRow("invalid_request", 400, Code.INVALID_ARGUMENT, False),
    errors.InvalidOption: ErrorRow("invalid_option", 422, Code.INVALID_ARGUMENT, False),
    errors.UnsupportedMedia: ErrorRow("unsupported_media", 415, Code.INVALID_ARGUMENT, False),
    errors.NotAcceptable: ErrorRow("not_acceptable", 406, Code.INVALID_ARGUMENT, False),
    errors.TooLarge: ErrorRow("too_large", 413, Code.INVALID_ARGUMENT, False),
    errors.Unauthorized: ErrorRow("unauthorized", 401, Code.UNAUTHENTICATED, False),
    errors.NotFound: ErrorRow("not_found", 404, Code.NOT_FOUND, False),
    # Decided by router/policy/ledger.py (patches in flight), intake/limits.py (bytes held) and, for
    # chats, Serve's queue (ChatFleet in ingress.py).
    errors.Overloaded: ErrorRow("overloaded", 429, Code.RESOURCE_EXHAUSTED, True),
    errors.DeadlineExceeded: ErrorRow("deadline_exceeded", 504, Code.DEADLINE_EXCEEDED, True),
    errors.Unavailable: ErrorRow("unavailable", 503, Code.UNAVAILABLE, True),
    errors.EncodeFailed: ErrorRow("encode_failed", 500, Code.INTERNAL, False),
}
"""A class without a row uses the row of its nearest ancestor."""


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
    item: int | None = None  # position of the item that caused it; None: the request as a whole
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
        """A body in OpenAI's format, with `param` and `code` beside our own keys."""
        return {"error": self.document() | {"param": param, "code": self.row.type}}


def fault(error: BaseException, request_id: str) -> Fault:
    """The error for the client. An unexpected exception is logged and becomes "internal_error"."""
    if isinstance(error, AtItem):
        inner = fault(error.error, request_id)
        return Fault(inner.row, inner.message, error.item, inner.retry_after_seconds)
    # Ray wraps what a deployment raises; `cause` is the original.
    cause = getattr(error, "cause", None)
    original = cause if isinstance(cause, ServiceError) else error
    row = row_of(type(original))
    if row is INTERNAL or not isinstance(original, ServiceError):
        log.error("request %s failed", request_id, exc_info=error)
        return Fault(INTERNAL, f"internal error: see request {request_id} in the logs")
    wait = original.retry_after_seconds if isinstance(original, Overloaded) else None
    return Fault(row, original.message[:MOST_CHARACTERS], retry_after_seconds=wait)


def row_of(kind: type[BaseException]) -> ErrorRow:
    return next((TABLE[cls] for cls in kind.__mro__ if cls in TABLE), INTERNAL)


def row_of_status(status: int) -> ErrorRow:
    if status == 405:
        return ErrorRow("method_not_allowed", 405, Code.UNIMPLEMENTED, False)
    rows = (row for row in TABLE.values() if row.status == status)
    return next(rows, ErrorRow("invalid_request", status, Code.INVALID_ARGUMENT, False))


def own_path(scope: Scope) -> str:
    """The path without the application's `route_prefix`, which Serve leaves in it."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def request_id_of(given: str | None) -> str:
    """The client's own id if it is safe to log, otherwise a new one."""
    if given and re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", given):
        return given
    return uuid.uuid4().hex


class Envelope:
    """Middleware that gives each HTTP request an id, records it, and responds to exceptions."""

    def __init__(
        self, app: ASGIApp, observer: Observer, counted: Mapping[str, str], unsent: Buffered
    ) -> None:
        """`counted`: the paths that the metrics count, with the `api` label of each.

        `unsent`: bytes that a response takes from it, as `state.unsent`, are held until the
        response has been sent.
        """
        self.app = app
        self.observer = observer
        self.counted = counted
        self.unsent = unsent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Turns exceptions of the application into responses. Passes on only cancellation, and
        exceptions after the response has started."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = Origin(request_id_of(headers.get("x-request-id")), headers.get("traceparent", ""))
        api = self.counted.get(own_path(scope))
        with self.unsent.hold() as unsent:
            with self.observer.exchange(api, origin, CLIENT_GONE) as exchange:
                scope.setdefault("state", {}).update(exchange=exchange, unsent=unsent)
                await self._answer(exchange, scope, receive, send)
            # Serve queues what it is given. Servers send "http.disconnect" once the response has
            # been sent. Serve may raise instead.
            with suppress(Exception):
                while unsent.size_bytes and (await receive())["type"] != "http.disconnect":
                    pass

    async def _answer(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = exchange.request_id
        given = Headers(scope=scope).get("x-request-id")

        async def received() -> Message:
            try:
                return await receive()
            except Exception as error:  # Serve raises where a server sends http.disconnect
                raise ClientDisconnect from error

        async def observed(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.code = str(message["status"])
                # Serve's proxy returns the client's own header. We add ours only if that was
                # missing or unsafe, and before the proxy does.
                if request_id != given:
                    MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self.app(scope, received, observed)
        except ClientDisconnect:
            return  # the client left while its body was read
        except Exception as error:
            if exchange.code != CLIENT_GONE:
                raise  # the response has started and can only be aborted
            problem = fault(error, request_id)
            exchange.failed(problem.row.type, problem.message)
            await error_response(problem)(scope, receive, observed)


def error_response(problem: Fault, body: dict[str, Any] | None = None) -> Response:
    """An error as an HTTP response, in our own API's format unless `body` is given."""
    headers = {}
    if problem.retry_after_seconds is not None:
        headers["retry-after"] = str(max(1, math.ceil(problem.retry_after_seconds)))
    if problem.row.status == 401:
        headers["www-authenticate"] = "Bearer"
    document = {"error": problem.document()} if body is None else body
    return JSONResponse(document, problem.row.status, headers)
