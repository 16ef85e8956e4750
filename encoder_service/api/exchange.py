"""Each request to encode, watched from its first byte to its last: series, span, log, failures.

Knows neither HTTP nor gRPC: they say when it begins, what came of it, and with which code.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from opentelemetry.trace import INVALID_SPAN, Span, StatusCode

from actors.telemetry.request_context import ORIGIN, Origin
from actors.telemetry.tracing import Spans, named
from actors.types import Media
from encoder_service.api.errors import Fault
from encoder_service.ops.access_log import access_log
from encoder_service.ops.metrics import ServiceMetrics

MOST_FAILURES = 20
"""Remembered, of each ingress replica."""


@dataclass(slots=True)
class Exchange:
    """One request, while it is answered."""

    api: str | None
    """http, grpc or grpc_stream; None: not a request to encode."""
    request_id: str
    span: Span
    code: str
    """Of the answer. As long as there is none: what it is when the client goes away."""
    items: int = 0
    patches: int = 0
    problem: Fault | None = None

    def admitted(self, media: Sequence[Media]) -> None:
        """What of the request is to be encoded."""
        self.items, self.patches = len(media), sum(one.plan.patches for one in media)
        self.span.set_attributes(named(items=self.items, patches=self.patches))


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that was answered with an error."""

    time: float
    """Seconds since 1970."""
    api: str
    code: str
    type: str
    message: str
    request_id: str


class Observer:
    """What one ingress replica keeps of its exchanges."""

    def __init__(self, metrics: ServiceMetrics, spans: Spans, access: bool) -> None:
        self.metrics = metrics
        self.spans = spans
        self.access = access_log() if access else None
        self.failures: deque[Failure] = deque(maxlen=MOST_FAILURES)

    @contextmanager
    def exchange(self, api: str | None, origin: Origin, code: str) -> Iterator[Exchange]:
        """Around one. `code`: see Exchange."""
        outer = ORIGIN.get()
        ORIGIN.set(origin)
        try:
            if api is None:
                yield Exchange(None, origin.request_id, INVALID_SPAN, code)
                return
            with self.watched(api, origin, code) as exchange:
                yield exchange
        finally:
            ORIGIN.set(outer)

    @contextmanager
    def watched(self, api: str, origin: Origin, code: str) -> Iterator[Exchange]:
        """Around one that is to encode."""
        started = time.perf_counter()
        with self.spans.span("encode", "server", api=api) as span:
            exchange = Exchange(api, origin.request_id, span, code)
            try:
                yield exchange
            finally:
                self.ended(exchange, api, time.perf_counter() - started)

    def ended(self, exchange: Exchange, api: str, seconds: float) -> None:
        """Tells everybody."""
        self.metrics.record(api, exchange.code, seconds)
        exchange.span.set_attributes(named(code=exchange.code))
        if problem := exchange.problem:
            exchange.span.set_status(StatusCode.ERROR, problem.row.type)
            kind, message = problem.row.type, problem.message
            self.failures.append(
                Failure(time.time(), api, exchange.code, kind, message, exchange.request_id)
            )
        if self.access:
            self.access.info(
                "%s %s %d items %d patches %.1f ms",
                api,
                exchange.code,
                exchange.items,
                exchange.patches,
                seconds * 1e3,
                extra=line(exchange, seconds),
            )


def line(exchange: Exchange, seconds: float) -> dict[str, str | int | float]:
    """The fields of a line in JSON."""
    fields: dict[str, str | int | float] = {
        "request_id": exchange.request_id,
        "api": exchange.api or "",
        "code": exchange.code,
        "items": exchange.items,
        "patches": exchange.patches,
        "seconds": round(seconds, 6),
    }
    if exchange.problem:
        fields["error"] = exchange.problem.row.type
    return fields
