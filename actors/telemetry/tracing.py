"""Spans by OpenTelemetry: what a request spends its time on, in every process that it passes.

A span's parent is found in request_context.ORIGIN, which travels with the work across threads and
processes. Only `tracing.export` other than `off` imports OpenTelemetry's SDK.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from opentelemetry.context import Context
from opentelemetry.trace import (
    INVALID_SPAN,
    Span,
    SpanKind,
    Tracer,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from actors.errors import ConfigError
from actors.options import TracingOptions
from actors.telemetry.request_context import ORIGIN, Origin

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

Value = str | int | float
KINDS = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}
W3C = TraceContextTextMapPropagator()
NEEDED = {
    "otlp": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
    "file": ("opentelemetry.sdk",),
}


class Spans:
    """The spans of one part of the service (ingress, router, encoder).

    Without a tracer, as with `tracing.export: off`, they do nothing.
    """

    def __init__(self, tracer: Tracer | None = None) -> None:
        self.tracer = tracer

    @contextmanager
    def span(
        self,
        name: str,
        kind: Literal["server", "client", "internal"] = "internal",
        **attributes: Value,
    ) -> Iterator[Span]:
        """Spans the block; spans opened inside, also in other processes, become its children.

        An exception that leaves the block marks the span as failed.
        """
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
                # Not by a token: a stream may be closed in another context than it was opened in.
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
    """Empty without a traceparent: the span begins a trace."""
    return W3C.extract({"traceparent": origin.traceparent}, context=Context())


def traceparent(span: Span) -> str:
    """The W3C Trace Context that makes others children of this span."""
    carrier: dict[str, str] = {}
    W3C.inject(carrier, set_span_in_context(span, Context()))
    return carrier.get("traceparent", "")


def check_tracing(options: TracingOptions) -> None:
    """Raises ConfigError where the packages that `tracing.export` needs are not installed."""
    for module in NEEDED.get(options.export, ()):
        if not is_installed(module):
            raise ConfigError(
                f"tracing.export is {options.export}, but {module} is not installed: "
                "pip install 'encoder-service[otel]', or set it to off"
            )


def is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent package
        return False


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
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    made = TracerProvider(
        resource=Resource.create({"service.name": "encoder-service"}),
        sampler=ParentBased(TraceIdRatioBased(options.sample_ratio)),
    )
    if options.export == "file":

        def line(span: ReadableSpan) -> str:
            return f"{span.to_json(indent=None)}\n"

        folder = Path(options.folder)
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / f"spans-{os.getpid()}.jsonl").open("a", encoding="utf-8")
        made.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(out=file, formatter=line)))
    else:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        exporter = OTLPSpanExporter(endpoint=options.endpoint or None)
        made.add_span_processor(BatchSpanProcessor(exporter))
    return made
