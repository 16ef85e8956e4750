"""Spans: nothing when off; parents, requests and attributes when on."""

from __future__ import annotations

import asyncio
import gzip
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from queue import Queue
from typing import Any, ClassVar

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from starlette.testclient import TestClient

from actors.errors import Unavailable
from actors.families.registry import read
from actors.options import TracingOptions
from actors.telemetry.tracing import (
    NOBODY,
    ORIGIN,
    Origin,
    check_tracing,
    named,
    open_spans,
    provider,
)
from encoder_service.api.http import build
from encoder_service.config import ServiceOptions
from encoder_service.service import Service
from tests.images import jpeg
from tests.unit.front_door import MODEL, Fleet

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"


@pytest.fixture(autouse=True)
def nobody() -> Iterator[None]:
    """What one test sets, the next does not see."""
    yield
    ORIGIN.set(NOBODY)


def to_files(folder: Path) -> TracingOptions:
    return TracingOptions(export="file", folder=str(folder))


def spans(folder: Path) -> list[dict[str, Any]]:
    """All that were written, in the order of their ends."""
    files = folder.glob("*.jsonl")
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_off_does_nothing_and_does_not_import_the_sdk() -> None:
    program = (
        "import sys\n"
        "from actors.options import TracingOptions\n"
        "from actors.telemetry.tracing import open_spans\n"
        "spans = open_spans(TracingOptions(), 'x')\n"
        "with spans.span('y', patches=1) as span:\n"
        "    span.set_attributes({'encoder.items': 2})\n"
        "spans.past('z', 1.0)\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry.sdk')]\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)
    origin = Origin("r", SAMPLED)
    ORIGIN.set(origin)
    with open_spans(TracingOptions(), "x").span("y") as span:
        assert ORIGIN.get() is origin
        assert not span.is_recording()


def test_a_child_belongs_to_its_parent_and_both_to_the_callers_trace(tmp_path: Path) -> None:
    found = open_spans(to_files(tmp_path), "test")
    ORIGIN.set(Origin("r-1", SAMPLED))
    with found.span("outer", "server", items=2) as outer:
        outer.set_attributes(named(code="200"))
        assert ORIGIN.get().request_id == "r-1"
        assert ORIGIN.get().traceparent.startswith(f"00-{TRACE}-")
        with found.span("inner", "client"):
            found.past("done", 0.25, patches=7)
    assert ORIGIN.get() == Origin("r-1", SAMPLED)
    done, inner, top = spans(tmp_path)
    assert {one["context"]["trace_id"] for one in (done, inner, top)} == {"0x" + TRACE}
    assert top["parent_id"] == "0x" + PARENT
    assert inner["parent_id"] == top["context"]["span_id"]
    assert done["parent_id"] == inner["context"]["span_id"]
    wanted = {"encoder.items": 2, "encoder.code": "200", "encoder.request_id": "r-1"}
    assert top["attributes"] == wanted
    assert done["attributes"] == {"encoder.patches": 7, "encoder.request_id": "r-1"}
    assert (top["kind"], inner["kind"]) == ("SpanKind.SERVER", "SpanKind.CLIENT")


def test_the_caller_decides_whether_its_trace_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    ORIGIN.set(Origin("r", UNSAMPLED))
    with open_spans(to_files(tmp_path), "test").span("not kept"):
        assert ORIGIN.get().traceparent.endswith("-00")
    ORIGIN.set(Origin("r", SAMPLED))
    with open_spans(to_files(tmp_path), "test").span("kept"):
        pass
    ORIGIN.set(NOBODY)
    with open_spans(to_files(tmp_path), "test").span("not kept either"):
        pass
    assert [one["name"] for one in spans(tmp_path)] == ["kept"]


def test_an_exception_is_the_spans_failure(tmp_path: Path) -> None:
    with (
        pytest.raises(Unavailable),
        open_spans(to_files(tmp_path), "test").span("lost"),
    ):
        raise Unavailable("gone")
    (lost,) = spans(tmp_path)
    assert lost["status"]["status_code"] == "ERROR"


class Listening(Fleet):
    """Remembers whose work came."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(error)
        self.origins: list[Origin] = []

    async def encode(self, *args: Any, **options: Any) -> Any:
        self.origins.append(ORIGIN.get())
        return await super().encode(*args, **options)


def test_a_request_over_http_is_a_span_and_hands_it_on(tmp_path: Path) -> None:
    fleet = Listening()
    options = ServiceOptions(model=MODEL, tracing=to_files(tmp_path))
    with TestClient(build(Service(options, read(MODEL), fleet))) as http:
        headers = {"traceparent": SAMPLED, "x-request-id": "mine"}
        http.post("/v1/encode", files={"image": jpeg(64, 64)}, headers=headers)
        http.post("/v1/encode", content=b"", headers={"content-type": "text/plain"})
        http.get("/v1/model")
    good, bad = spans(tmp_path)
    assert good["context"]["trace_id"] == "0x" + TRACE
    assert good["attributes"] == {
        "encoder.api": "http",
        "encoder.code": "200",
        "encoder.items": 1,
        "encoder.patches": 16,
        "encoder.request_id": "mine",
    }
    (origin,) = fleet.origins
    assert origin.request_id == "mine"
    assert origin.traceparent.split("-")[2] == good["context"]["span_id"].removeprefix("0x")
    assert (bad["status"]["status_code"], bad["attributes"]["encoder.code"]) == ("ERROR", "415")


class Collector(BaseHTTPRequestHandler):
    """Takes what OTLP posts."""

    came: ClassVar[Queue[tuple[str, bytes]]] = Queue()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.came.put((self.path, body))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


def test_a_collector_gets_them_over_http() -> None:
    server = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
    options = TracingOptions(export="otlp", endpoint=endpoint)
    try:
        with open_spans(options, "test").span("sent", patches=3):
            pass
        assert provider(options).force_flush(30_000)
        path, body = Collector.came.get(timeout=30)
    finally:
        provider(options).shutdown()
        server.shutdown()
        server.server_close()
    (resource,) = ExportTraceServiceRequest.FromString(gzip_or_plain(body)).resource_spans
    (span,) = resource.scope_spans[0].spans
    assert (path, span.name) == ("/v1/traces", "sent")
    assert resource.scope_spans[0].scope.name == "encoder_service.test"


def gzip_or_plain(body: bytes) -> bytes:
    return gzip.decompress(body) if body.startswith(b"\x1f\x8b") else body


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("opentelemetry.exporter", "opentelemetry.exporter.otlp.proto.http"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(Exception, match=r"pip install '.\[otel\]'"):
        check_tracing(TracingOptions(export="otlp"))
    check_tracing(TracingOptions())


def test_tasks_have_origins_of_their_own() -> None:
    async def one(name: str) -> str:
        ORIGIN.set(Origin(name))
        await asyncio.sleep(0)
        return ORIGIN.get().request_id

    async def both() -> tuple[str, str]:
        first, second = await asyncio.gather(one("a"), one("b"))
        return first, second

    assert asyncio.run(both()) == ("a", "b")
