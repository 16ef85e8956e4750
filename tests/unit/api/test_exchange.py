"""What an ingress keeps of its requests: series, failures, lines of a log."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from queue import Queue
from threading import Event

import pytest
from starlette.testclient import TestClient

from actors.errors import Overloaded
from actors.telemetry.tracing import (
    LOG,
    NOBODY,
    ORIGIN,
    Origin,
    Spans,
    name_requests,
    named_request,
)
from encoder_service.api.http import build
from encoder_service.ops.exchange import (
    MOST_FAILURES,
    Dropping,
    Observer,
    ServiceMetrics,
    access_log,
)
from tests.images import jpeg
from tests.unit.front_door import Fleet, post, service


class Kept(logging.Handler):
    """Lines, as they come."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.came = Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        self.came.set()


@pytest.fixture
def kept() -> Iterator[Kept]:
    """In the place of Serve's handlers."""
    log, handler = logging.getLogger(LOG), Kept()
    before, log.handlers, level = log.handlers, [handler], log.level
    log.setLevel(logging.INFO)
    access_log.cache_clear()
    yield handler
    access_log.cache_clear()
    log.handlers = before
    log.setLevel(level)


def test_failures_are_remembered_and_forgotten() -> None:
    one = service(Fleet(Overloaded("full", 1)))
    with TestClient(build(one)) as http:
        post(http, **{"x-request-id": "mine"})
        (failure,) = one.observer.failures
        assert (failure.api, failure.code, failure.type) == ("http", "429", "overloaded")
        assert (failure.message, failure.request_id) == ("full", "mine")
        for _ in range(MOST_FAILURES + 3):
            post(http)
        http.get("/v2")
    assert len(one.observer.failures) == MOST_FAILURES
    assert "mine" not in {each.request_id for each in one.observer.failures}


def test_a_request_is_one_line_with_its_numbers(kept: Kept) -> None:
    with TestClient(build(service(Fleet()))) as http:
        files = [("image", jpeg(64, 64)), ("image", jpeg(128, 64))]
        http.post("/v1/encode", files=files, headers={"x-request-id": "mine"})
        http.get("/v1/model")
    assert kept.came.wait(30)
    (record,) = kept.records
    assert record.getMessage().startswith("http 200 2 items 48 patches ")
    fields = vars(record)
    assert (fields["request_id"], fields["api"], fields["code"]) == ("mine", "http", "200")
    assert (fields["items"], fields["patches"]) == (2, 48)
    assert fields["seconds"] > 0
    json.dumps({name: fields[name] for name in ("request_id", "code", "items", "seconds")})


def test_no_access_log_means_no_line(kept: Kept) -> None:
    observer = Observer(ServiceMetrics(), Spans(), access=False)
    with observer.exchange("http", Origin("r"), "499"):
        pass
    assert observer.access is None
    assert not kept.records


def test_a_full_log_drops_lines_and_says_so(kept: Kept) -> None:
    queue: Queue[logging.LogRecord] = Queue(1)
    handler, record = Dropping(queue), logging.makeLogRecord({"msg": "line"})
    for _ in range(3):
        handler.enqueue(record)
    assert queue.get_nowait() is record
    handler.enqueue(record)
    assert [each.getMessage() for each in kept.records] == ["2 lines of the access log dropped"]


def test_lines_name_the_request_that_they_are_of(kept: Kept) -> None:
    name_requests()
    name_requests()
    assert kept.filters == [named_request]
    log = logging.getLogger(LOG)
    log.info("of nobody")
    ORIGIN.set(Origin("r-7"))
    log.error("of somebody", extra={"request_id": "of one handle call"})
    ORIGIN.set(NOBODY)
    first, second = kept.records
    assert not hasattr(first, "request_id")
    assert vars(second)["request_id"] == "r-7"
