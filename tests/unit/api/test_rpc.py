"""gRPC statuses around a fleet in memory: what a real one cannot be made to do on demand."""

from __future__ import annotations

import asyncio
import json
import string
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import grpc
import pytest
from grpc_health.v1 import health_pb2

from actors.errors import Overloaded, Unavailable
from encoder_service.api import grpc as rpc
from encoder_service.api.grpc import (
    CHUNK_BYTES,
    MOST_WATCHES,
    EncoderCalls,
    HealthCalls,
    chunks,
    response,
)
from encoder_service.wire import encoder_pb2 as pb
from encoder_service.wire.encoder_grpc import CHUNK_KEY, LARGEST_CHUNK_BYTES
from tests.images import jpeg, png
from tests.unit.front_door import Fleet, service

PRINTABLE = string.ascii_letters + string.digits + string.punctuation.replace("%", "") + " "


class Aborted(Exception):
    """As gRPC's own: ends a call whose status is set."""


class Context:
    """What gRPC keeps of a call."""

    def __init__(self, request_id: str = "r-1", **metadata: str) -> None:
        self.code = grpc.StatusCode.OK
        self.details = ""
        self.metadata = (("request_id", request_id), *metadata.items())
        self.trailing: tuple[tuple[str, str], ...] = ()
        self.written: list[bytes] = []
        self.ended: list[Callable[[Any], None]] = []

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self.metadata

    def set_trailing_metadata(self, metadata: tuple[tuple[str, str], ...]) -> None:
        self.trailing = metadata

    def cancelled(self) -> bool:
        return False

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.ended.append(callback)

    async def write(self, message: bytes) -> None:
        self.written.append(message)

    async def abort(self, code: grpc.StatusCode, details: str, trailing: Any = ()) -> None:
        self.code, self.details = code, details
        self.trailing = trailing or self.trailing
        raise Aborted


def request(**options: Any) -> pb.EncodeRequest:
    return pb.EncodeRequest(items=[pb.Item(data=jpeg(64, 64))], options=pb.Options(**options))


def call(
    fleet: Fleet, sent: pb.EncodeRequest, request_id: str = "r-1", **limits: Any
) -> tuple[Context, EncoderCalls]:
    context, calls = Context(request_id), EncoderCalls(service(fleet, **limits), 1000)
    with suppress(Aborted):
        asyncio.run(calls.Encode(sent, context))
    return context, calls


def test_overload_says_when_to_come_back() -> None:
    context, calls = call(Fleet(Overloaded("full", 2.5)), request())
    assert context.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert json.loads(context.details) == {
        "type": "overloaded",
        "message": "full",
        "item": None,
        "retryable": True,
        "retry_after_s": 2.5,
    }
    assert context.trailing == (("request_id", "r-1"), ("retry-after", "2.5"))
    counted = 'encoder_requests_total{api="grpc",code="RESOURCE_EXHAUSTED"} 1.0'
    assert counted in calls.service.metrics.text()


def test_without_room_a_call_is_refused_before_it_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(rpc, "read")
    fleet = Fleet()
    fleet.full = Overloaded("full", 2.5)
    whole, _ = call(fleet, request())
    streamed = Context()

    with pytest.raises(Aborted):
        asyncio.run(EncoderCalls(service(fleet), 1000).EncodeStream(request(), streamed))
    for context in (whole, streamed):
        assert context.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert context.trailing == (("request_id", "r-1"), ("retry-after", "2.5"))


def test_the_unforeseen_is_not_told() -> None:
    context, _ = call(Fleet(KeyError("secret")), request())
    assert context.code is grpc.StatusCode.INTERNAL
    assert "secret" not in context.details
    assert "r-1" in context.details


@pytest.mark.parametrize("text", ["x", "😀", "é", "%", "\n", '"', "\0"])
def test_details_fit_in_a_header_whatever_was_sent(text: str) -> None:
    sent = pb.EncodeRequest(items=[pb.Item(type=text * 100_000, data=b"x")])
    context, _ = call(Fleet(), sent)
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT
    assert json.loads(context.details)["message"].startswith("items[0].type must be")
    # As gRPC writes grpc-message: printable ASCII as it is, all else as %XX a byte.
    assert len(quote(context.details, safe=PRINTABLE)) < 7000


@pytest.mark.parametrize("full", [False, True])
def test_items_are_counted_before_they_are_built_and_whether_there_is_room(full: bool) -> None:
    sent = pb.EncodeRequest.FromString(b"\x0a\x02\x12\x00" * 1_000_000)
    fleet = Fleet()
    fleet.full = Overloaded("full", 2.5) if full else None
    started = time.process_time()
    context, _ = call(fleet, sent)
    assert json.loads(context.details)["type"] == "too_large"
    assert time.process_time() - started < 0.5


@pytest.mark.parametrize("full", [False, True])
def test_all_of_a_request_is_counted_whether_there_is_room_or_not(full: bool) -> None:
    sent = pb.EncodeRequest(items=[pb.Item(url="x" * 2000)])
    fleet = Fleet()
    fleet.full = Overloaded("full", 2.5) if full else None
    context, _ = call(fleet, sent, max_body_bytes=1000)
    assert json.loads(context.details)["type"] == "too_large"


def test_a_request_id_that_is_not_fit_for_a_log_is_replaced() -> None:
    context, _ = call(Fleet(KeyError()), request(), "$(id) ")
    ((name, new),) = context.trailing
    assert name == "request_id"
    assert f"request {new} " in json.loads(context.details)["message"]
    assert "$" not in context.details


def test_a_big_answer_is_put_together_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def seen(document: Any) -> bytes:
        threads.append(threading.current_thread().name)
        return response(document)

    monkeypatch.setattr("encoder_service.api.grpc.response", seen)
    for side in (64, 2048):
        sent = pb.EncodeRequest(items=[pb.Item(data=png(side, side))])
        call(Fleet(), sent)
    small, big = threads
    assert small == "MainThread"
    assert big != "MainThread"


def watch(calls: HealthCalls, name: str = "") -> tuple[Context, Any]:
    context = Context()
    return context, calls.Watch(health_pb2.HealthCheckRequest(service=name), context)


async def test_only_a_few_may_watch_at_a_time() -> None:
    calls = HealthCalls(service(Fleet()))
    watching = [watch(calls)[1] for _ in range(MOST_WATCHES)]
    for one in watching:
        assert (await anext(one)).status == health_pb2.HealthCheckResponse.SERVING
    context, refused = watch(calls)
    with pytest.raises(Aborted):
        await anext(refused)
    assert context.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    for one in watching:
        await one.aclose()
    await anext(watch(calls)[1])


def test_watching_what_is_not_here_ends() -> None:
    async def run() -> list[int]:
        return [one.status async for one in watch(HealthCalls(service(Fleet())), "other")[1]]

    assert asyncio.run(run()) == [health_pb2.HealthCheckResponse.SERVICE_UNKNOWN]


def test_a_stream_ends_with_its_status() -> None:
    context = Context()
    with pytest.raises(Aborted):
        asyncio.run(
            EncoderCalls(service(Fleet(Unavailable("none"))), 1000).EncodeStream(request(), context)
        )
    assert context.code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
def test_chunks_put_together_are_the_whole(size: int) -> None:
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    document = {"index": 3, "type": "image", "tokens": 9, "data": memoryview(data)}
    written = list(chunks({"model": "m", "weights": "dummy"}, document, CHUNK_BYTES))
    pieces = [pb.EncodeChunk.FromString(one) for one in written]
    assert b"".join(piece.embedding.data for piece in pieces) == data
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert {piece.embedding.index for piece in pieces} == {3}
    assert (pieces[0].model, pieces[0].embedding.tokens) == ("m", 9)
    assert all(len(piece.embedding.data) <= CHUNK_BYTES for piece in pieces)


@pytest.mark.parametrize(("asked", "messages"), [({}, 1), ({CHUNK_KEY: "65536"}, 6)])
def test_a_stream_has_chunks_as_large_as_the_call_asks(
    asked: dict[str, str], messages: int
) -> None:
    context = Context(**asked)
    sent = pb.EncodeRequest(items=[pb.Item(data=jpeg(1024, 1024))])  # 393,216 bytes of rows
    asyncio.run(EncoderCalls(service(Fleet()), 1000).EncodeStream(sent, context))
    assert len(context.written) == messages


@pytest.mark.parametrize("asked", ["0", "65535", str(LARGEST_CHUNK_BYTES + 1), "-1", "x", "9" * 99])
def test_chunks_that_no_client_takes_are_refused(asked: str) -> None:
    calls = EncoderCalls(service(Fleet()), 1000)
    streams: list[tuple[Any, Any]] = [
        (calls.EncodeStream, request()),
        (calls.Fetch, pb.FetchRequest(reference="r1.a")),
    ]
    for call, sent in streams:
        context = Context(**{CHUNK_KEY: asked})
        with pytest.raises(Aborted):
            asyncio.run(call(sent, context))
        assert context.code is grpc.StatusCode.INVALID_ARGUMENT
        assert "chunk-bytes: must be a number from 65536 to 3670016" in context.details
