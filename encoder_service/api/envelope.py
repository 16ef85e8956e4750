"""What every HTTP exchange has: a request id, errors in one shape, and a place in the metrics."""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actors.telemetry.tracing import Origin
from encoder_service.api.errors import Fault, fault, row_of_status
from encoder_service.ops.exchange import Exchange, Observer

CLIENT_GONE = "499"
"""nginx's code for a client that hung up: only the metrics see it."""


def request_id_of(given: str | None) -> str:
    """The client's own id if it is safe to log, otherwise a new one."""
    if given and re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", given):
        return given
    return uuid.uuid4().hex


class Envelope:
    """Middleware that gives each request an id, records it, and answers exceptions."""

    def __init__(self, app: ASGIApp, observer: Observer, counted: Mapping[str, str]) -> None:
        """`counted`: the paths that the metrics count, and under which `api`."""
        self.app = app
        self.observer = observer
        self.counted = counted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Turns every exception of the application into a response; only cancellation passes."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = Origin(request_id_of(headers.get("x-request-id")), headers.get("traceparent", ""))
        api = self.counted.get(scope["path"])
        with self.observer.exchange(api, origin, CLIENT_GONE) as exchange:
            scope.setdefault("state", {})["exchange"] = exchange
            await self._answer(exchange, scope, receive, send)

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
                # Serve's proxy returns the client's own header. We add it only if it was missing
                # or unsafe, and before the proxy does.
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
            await response(problem)(scope, receive, observed)


def response(problem: Fault, body: dict[str, Any] | None = None) -> Response:
    """An error as an HTTP response, in our own API's shape unless `body` is given."""
    headers = {}
    if problem.retry_after_seconds is not None:
        headers["retry-after"] = str(max(1, math.ceil(problem.retry_after_seconds)))
    if problem.row.status == 401:
        headers["www-authenticate"] = "Bearer"
    document = {"error": problem.document()} if body is None else body
    return JSONResponse(document, problem.row.status, headers)


async def http_exception(request: Request, error: HTTPException) -> Response:
    """The framework's own errors: unknown routes, methods that are not allowed."""
    row = row_of_status(error.status_code)
    answer = response(Fault(row, f"{request.method} {request.url.path}: {error.detail}"))
    answer.headers.update(error.headers or {})
    if error.status_code == 405:
        # The framework lists only the methods of the path's first route.
        answer.headers["allow"] = ", ".join(sorted(methods(request)))
    return answer


def methods(request: Request) -> set[str]:
    found: set[str] = set()
    for route in request.app.routes:
        if route.matches(request.scope)[0] != Match.NONE:
            found |= getattr(route, "methods", None) or set()
    return found
