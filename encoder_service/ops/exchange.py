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
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from actors.telemetry.tracing import LOG, ORIGIN, Origin, Spans, named
from actors.types import Media

SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
MOST_FAILURES = 20
"""Failures that each ingress replica remembers."""
MOST_WAITING_LINES = 10_000
"""Access log lines that may wait to be written; more are dropped."""


class ServiceMetrics:
    """Series of one ingress replica. `api`: http, grpc, grpc_stream, plan, grpc_plan, chat
    or embeddings."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "encoder_requests_total",
            "Encode, plan, embedding and chat requests, by response status.",
            ("api", "code"),
            registry=self.registry,
        )
        self.request_seconds = Histogram(
            "encoder_request_seconds",
            "Seconds from the first byte of a request to the last byte of its response.",
            ("api",),
            buckets=SECONDS,
            registry=self.registry,
        )
        self.unsent_bytes = Gauge(
            "encoder_unsent_bytes",
            "Bytes of responses that this ingress holds until their clients have read them.",
            registry=self.registry,
        )

    def record(self, api: str, code: str, seconds: float) -> None:
        self.requests.labels(api, code).inc()
        self.request_seconds.labels(api).observe(seconds)

    def text(self) -> str:
        return generate_latest(self.registry).decode()


@dataclass(slots=True)
class Exchange:
    request_id: str
    span: Span
    code: str
    """The response's code. Until there is one: the code to record if the client hangs up."""
    items: int = 0
    patches: int = 0
    error_type: str = ""
    error_message: str = ""

    def admitted(self, media: Sequence[Media]) -> None:
        self.items, self.patches = len(media), sum(one.plan.patches for one in media)
        self.span.set_attributes(named(items=self.items, patches=self.patches))

    def failed(self, error_type: str, message: str) -> None:
        self.error_type, self.error_message = error_type, message


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
        self.log: logging.Logger | None = None
        self.configure(access=access)
        self.failures: deque[Failure] = deque(maxlen=MOST_FAILURES)

    def configure(self, *, access: bool) -> None:
        self.log = self.log or (access_log() if access else None)
        self.access = self.log if access else None

    @contextmanager
    def exchange(self, api: str | None, origin: Origin, code: str) -> Iterator[Exchange]:
        """Wraps one request and sets its origin as ORIGIN.

        `api`: see ServiceMetrics; None: not counted. `code`: see Exchange.
        """
        outer = ORIGIN.get()
        ORIGIN.set(origin)
        try:
            if api is None:
                yield Exchange(origin.request_id, INVALID_SPAN, code)
                return
            started = time.perf_counter()
            with self.spans.span("encode", "server", api=api) as span:
                exchange = Exchange(origin.request_id, span, code)
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
                extra={
                    "request_id": one.request_id,
                    "api": api,
                    "code": one.code,
                    "items": one.items,
                    "patches": one.patches,
                    "seconds": round(seconds, 6),
                }
                | ({"error": kind} if kind else {}),
            )


class Dropping(QueueHandler):
    """Drops lines when the queue is full, and logs how many, so that logging never delays a
    request."""

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

    A thread formats and writes the lines. The event loop only puts them into a queue.
    """
    queue: Queue[logging.LogRecord] = Queue(MOST_WAITING_LINES)
    log = logging.getLogger(f"{LOG}.access")
    log.propagate = False
    log.handlers = [Dropping(queue)]
    listener = QueueListener(queue, *logging.getLogger(LOG).handlers, respect_handler_level=True)
    listener.start()
    atexit.register(listener.stop)
    return log
