"""Spans by OpenTelemetry, sent over OTLP or written to files. Imported only where tracing is on."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    SimpleSpanProcessor,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span as Recorded
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from actors.options import TracingOptions
from actors.telemetry.request_context import ORIGIN, Origin
from actors.telemetry.tracing import Kind, Value

PREFIX = "encoder."
"""Of the names of attributes."""
KINDS = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}
W3C = TraceContextTextMapPropagator()


class OtelSpan:
    """tracing.Span."""

    def __init__(self, recorded: Recorded) -> None:
        self.recorded = recorded

    def set(self, **attributes: Value) -> None:
        """See Span."""
        self.recorded.set_attributes(named(attributes))

    def fail(self, reason: str) -> None:
        """See Span."""
        self.recorded.set_status(Status(StatusCode.ERROR, reason))


class OtelSpans:
    """tracing.Spans."""

    def __init__(self, options: TracingOptions, part: str) -> None:
        self.tracer = provider(options).get_tracer(f"encoder_service.{part}")

    @contextmanager
    def span(self, name: str, kind: Kind = "internal", **attributes: Value) -> Iterator[OtelSpan]:
        """See Spans. An exception that passes is the span's failure too."""
        outer = ORIGIN.get()
        with self.tracer.start_as_current_span(
            name,
            parent(outer),
            KINDS[kind],
            named(attributes | {"request_id": outer.request_id}),
        ) as recorded:
            ORIGIN.set(Origin(outer.request_id, traceparent(recorded)))
            try:
                yield OtelSpan(recorded)
            finally:
                # Not by a token: a stream may be closed from another context than it began in.
                ORIGIN.set(outer)

    def past(
        self, name: str, seconds: float, *, ago_seconds: float = 0, **attributes: Value
    ) -> None:
        """See Spans."""
        outer, end = ORIGIN.get(), time.time_ns() - int(ago_seconds * 1e9)
        recorded = self.tracer.start_span(
            name,
            parent(outer),
            attributes=named(attributes | {"request_id": outer.request_id}),
            start_time=end - int(seconds * 1e9),
        )
        recorded.end(end)


def named(attributes: dict[str, Value]) -> dict[str, Value]:
    """With our prefix."""
    return {PREFIX + name: value for name, value in attributes.items()}


def parent(origin: Origin) -> Context:
    """Empty if there is none: the span begins a trace."""
    return W3C.extract({"traceparent": origin.traceparent}, context=Context())


def traceparent(recorded: Recorded) -> str:
    """What the children of a span are told."""
    carrier: dict[str, str] = {}
    W3C.inject(carrier, set_span_in_context(recorded, Context()))
    return carrier.get("traceparent", "")


@cache
def provider(options: TracingOptions) -> TracerProvider:
    """The one of this process. Sends what is left when the process ends."""
    made = TracerProvider(
        resource=Resource.create({"service.name": "encoder-service"}),
        sampler=ParentBased(TraceIdRatioBased(options.sample_ratio)),
    )
    made.add_span_processor(processor(options))
    return made


def processor(options: TracingOptions) -> SpanProcessor:
    """To where the configuration says."""
    if options.export == "file":
        folder = Path(options.folder)
        folder.mkdir(parents=True, exist_ok=True)
        return SimpleSpanProcessor(Lines(folder / f"spans-{os.getpid()}.jsonl"))
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return BatchSpanProcessor(OTLPSpanExporter(endpoint=options.endpoint or None))


class Lines(SpanExporter):
    """Spans as lines of JSON."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Adds them."""
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(f"{span.to_json(indent=None)}\n" for span in spans)
        return SpanExportResult.SUCCESS
