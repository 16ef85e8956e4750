"""Attributes work to its request, by the request id in every log line and OpenTelemetry's spans.

ORIGIN travels with the work across threads and processes. OpenTelemetry's SDK is only imported if
`tracing.export` is not `off`.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from actors.errors import ConfigError, how_to_install
from actors.options import TracingOptions

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

LOG = "ray.serve"  # the logger that Serve writes to a file per replica

Value = str | int | float
KINDS = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}
W3C = TraceContextTextMapPropagator()
NEEDED = {
    "otlp": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
    "file": ("opentelemetry.sdk",),
}


@dataclass(frozen=True, slots=True)
class Origin:
    """What logs and spans need to know about a request. Can be pickled."""

    request_id: str = ""  # safe to log; empty if unknown
    traceparent: str = ""
    """W3C Trace Context of the span that caused the work; empty if it is not traced."""


NOBODY = Origin()

ORIGIN: ContextVar[Origin] = ContextVar("origin", default=NOBODY)
"""The request of the running task. Calls to other processes pass it as an argument."""


def named_request(record: logging.LogRecord) -> bool:
    """A filter that sets `request_id` on each log record. Serve's own filter, which runs before,
    only knows the id of a handle call, and the router makes its calls outside of their request."""
    if request_id := ORIGIN.get().request_id:
        record.request_id = request_id
    return True


def name_requests() -> None:
    """Adds request ids to this replica's log. Call it after Serve has set up its handlers."""
    for handler in logging.getLogger(LOG).handlers:
        handler.addFilter(named_request)  # has no effect if it was added before


class Spans:
    """The spans of one part of the service (ingress, router, encoder). Without a tracer, as with
    `tracing.export: off`, they do nothing."""

    def __init__(self, tracer: Tracer | None = None) -> None:
        self.tracer = tracer

    @contextmanager
    def span(
        self,
        name: str,
        kind: Literal["server", "client", "internal"] = "internal",
        **attributes: Value,
    ) -> Iterator[Span]:
        """Opens a span for the block. Spans opened inside, also in other processes, become its
        children. An exception that leaves the block marks the span as failed."""
        if self.tracer is None:
            yield INVALID_SPAN
            return
        outer = ORIGIN.get()
        values = named(**attributes, request_id=outer.request_id)
        with self.tracer.start_as_current_span(name, parent(outer), KINDS[kind], values) as span:
            ORIGIN.set(Origin(outer.request_id, traceparent(span)))
            try:
                yield span
            finally:
                # Not with a token, because a stream may be closed in another context than it was
                # opened in.
                ORIGIN.set(outer)

    def past(self, name: str, seconds: float, **attributes: Value) -> None:
        """Adds a span for work that has just ended and took `seconds`."""
        if self.tracer is None:
            return
        outer, end = ORIGIN.get(), time.time_ns()
        values = named(**attributes, request_id=outer.request_id)
        start = end - int(seconds * 1e9)
        self.tracer.start_span(name, parent(outer), attributes=values, start_time=start).end(end)


def named(**attributes: Value) -> dict[str, Value]:
    return {f"encoder.{name}": value for name, value in attributes.items()}


def parent(origin: Origin) -> Context:
    """The context of the parent span. Empty without a traceparent: the span begins a trace."""
    return W3C.extract({"traceparent": origin.traceparent}, context=Context())


def traceparent(span: Span) -> str:
    """The W3C Trace Context that makes others children of this span."""
    carrier: dict[str, str] = {}
    W3C.inject(carrier, set_span_in_context(span, Context()))
    return carrier.get("traceparent", "")


def check_tracing(options: TracingOptions) -> None:
    """Raises ConfigError if the packages that `tracing.export` needs are not installed."""
    for module in NEEDED.get(options.export, ()):
        try:
            import_module(module)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"tracing.export is {options.export}, but {module} is not installed: "
                f"{how_to_install('otel')}, or set it to off"
            ) from error


@cache
def open_spans(options: TracingOptions, part: str) -> Spans:
    """The spans of a part of the service in this process. Raises ConfigError."""
    if options.export == "off":
        return Spans()
    check_tracing(options)
    return Spans(provider(options).get_tracer(f"encoder_service.{part}"))


@cache
def provider(options: TracingOptions) -> TracerProvider:
    """This process's provider. It exports what is left when the process exits."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import (
        BatchSpanProcessor,
        ConsoleSpanExporter,
        SimpleSpanProcessor,
    )

    made = TracerProvider(resource=Resource.create({"service.name": "encoder-service"}))
    if options.export == "file":

        def line(span: ReadableSpan) -> str:
            return f"{span.to_json(indent=None)}\n"

        folder = Path(options.folder)
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / f"spans-{os.getpid()}.jsonl").open("a", encoding="utf-8")
        weakref.finalize(made, file.close)
        made.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(out=file, formatter=line)))
    else:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        exporter = OTLPSpanExporter(endpoint=options.endpoint or None)
        made.add_span_processor(BatchSpanProcessor(exporter))
    return made
