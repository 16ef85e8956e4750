"""What the front door records of each request: series, a span, an access log line, failures."""

from __future__ import annotations

import atexit
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from logging.handlers import QueueHandler, QueueListener
from queue import Full, Queue

from opentelemetry.trace import INVALID_SPAN, Span, StatusCode

from actors.telemetry.tracing import LOG, ORIGIN, Origin, Spans, named
from actors.types import Media
from encoder_service.ops.metrics import ServiceMetrics

MOST_FAILURES = 20
"""Remembered by each ingress replica."""
MOST_WAITING_LINES = 10_000
"""Access log lines that may wait to be written; more are dropped."""


@dataclass(slots=True)
class Exchange:
    api: str | None
    """http, grpc, grpc_stream or chat; None: not counted."""
    request_id: str
    span: Span
    code: str
    """Of the response. Until there is one: the code to record if the client hangs up."""
    items: int = 0
    patches: int = 0
    error_type: str = ""
    error_message: str = ""

    def admitted(self, media: Sequence[Media]) -> None:
        self.items, self.patches = len(media), sum(one.plan.patches for one in media)
        self.span.set_attributes(named(items=self.items, patches=self.patches))

    def failed(self, error_type: str, message: str) -> None:
        self.error_type, self.error_message = error_type, message

    def log_fields(self, seconds: float) -> dict[str, str | int | float]:
        fields: dict[str, str | int | float] = {
            "request_id": self.request_id,
            "api": self.api or "",
            "code": self.code,
            "items": self.items,
            "patches": self.patches,
            "seconds": round(seconds, 6),
        }
        return fields | ({"error": self.error_type} if self.error_type else {})


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that was answered with an error, as GET /v1/status lists it."""

    time: float
    """Seconds since 1970."""
    api: str
    code: str
    type: str
    message: str
    request_id: str


class Observer:
    """Records the exchanges of one ingress replica."""

    def __init__(self, metrics: ServiceMetrics, spans: Spans, access: bool) -> None:
        self.metrics = metrics
        self.spans = spans
        self.access = access_log() if access else None
        self.failures: deque[Failure] = deque(maxlen=MOST_FAILURES)

    @contextmanager
    def exchange(self, api: str | None, origin: Origin, code: str) -> Iterator[Exchange]:
        """Wraps one request and sets its origin as ORIGIN. `api`, `code`: see Exchange."""
        outer = ORIGIN.get()
        ORIGIN.set(origin)
        try:
            if api is None:
                yield Exchange(None, origin.request_id, INVALID_SPAN, code)
                return
            started = time.perf_counter()
            with self.spans.span("encode", "server", api=api) as span:
                exchange = Exchange(api, origin.request_id, span, code)
                try:
                    yield exchange
                finally:
                    self._record(exchange, api, time.perf_counter() - started)
        finally:
            ORIGIN.set(outer)

    def _record(self, one: Exchange, api: str, seconds: float) -> None:
        self.metrics.record(api, one.code, seconds)
        one.span.set_attributes(named(code=one.code))
        if kind := one.error_type:
            one.span.set_status(StatusCode.ERROR, kind)
            self.failures.append(
                Failure(time.time(), api, one.code, kind, one.error_message, one.request_id)
            )
        if self.access:
            self.access.info(
                "%s %s %d items %d patches %.1f ms",
                api,
                one.code,
                one.items,
                one.patches,
                seconds * 1e3,
                extra=one.log_fields(seconds),
            )


class Dropping(QueueHandler):
    """Drops lines when the queue is full, and says how many: logging never delays a request."""

    dropped = 0

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except Full:
            self.dropped += 1
            return
        if self.dropped:
            logging.getLogger(LOG).warning("%d lines of the access log dropped", self.dropped)
            self.dropped = 0


@cache
def access_log() -> logging.Logger:
    """This process's access log, in front of the handlers that Serve configured.

    A thread formats and writes the lines; the event loop pays for one entry of a queue.
    """
    queue: Queue[logging.LogRecord] = Queue(MOST_WAITING_LINES)
    log = logging.getLogger(f"{LOG}.access")
    log.propagate = False
    log.handlers = [Dropping(queue)]
    listener = QueueListener(queue, *logging.getLogger(LOG).handlers, respect_handler_level=True)
    listener.start()
    atexit.register(listener.stop)
    return log
