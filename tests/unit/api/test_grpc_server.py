"""The gRPC server around a fleet in memory: tokens, readers that stop, shared ports."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from actors.errors import DeadlineExceeded, Overloaded, StartError
from actors.families.registry import read
from encoder_service.api import grpc as rpc
from encoder_service.api import grpc_calls
from encoder_service.api.grpc import CHUNK_BYTES, ENVELOPE_BYTES, EncoderCalls, serving
from encoder_service.api.grpc_calls import OPEN_BYTES, OpenReads, Reads
from encoder_service.bench.cluster import free_ports
from encoder_service.client.grpc_transport import CONNECTIONS, GrpcTransport
from encoder_service.config import AuthOptions, IngressOptions, LimitOptions, ServiceOptions
from encoder_service.service import Service
from encoder_service.wire import encoder_pb2 as pb
from encoder_service.wire.documents import RequestItem
from encoder_service.wire.encoder_grpc import LARGEST_CHUNK_BYTES, SERVICE, EncoderStub
from encoder_service.wire.formats import Document
from tests.images import jpeg
from tests.unit.api.test_rpc import Aborted, Context, request
from tests.unit.front_door import MODEL, Fleet, service

LARGE = jpeg(1024, 1024)
ITEM = RequestItem("image", jpeg(64, 64), None)
LARGE_BYTES = 1024 * 192 * 2


@asynccontextmanager
async def listening(one: Service) -> AsyncIterator[tuple[str, EncoderStub]]:
    (port,) = free_ports(1)
    target = f"127.0.0.1:{port}"
    async with serving(one, IngressOptions(grpc_port=port)), grpc.aio.insecure_channel(target) as c:
        yield target, EncoderStub(c)


def images(count: int, image: bytes = LARGE) -> pb.EncodeRequest:
    return pb.EncodeRequest(items=[pb.Item(data=image)] * count)


def test_without_a_token_no_message_is_read() -> None:
    tokens = AuthOptions(token_sha256=(hashlib.sha256(b"open").hexdigest(),))
    options = ServiceOptions(model=MODEL, auth=tokens, limits=LimitOptions(max_body_bytes=2**24))
    one = Service(options, read(MODEL), Fleet())
    read_messages: list[object] = []

    async def run() -> None:
        async with listening(one) as (_, stub):
            sent = images(1, bytes(2**24))
            for call in (stub.Encode(sent), stub.EncodeStream(sent).read()):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
                assert json.loads(caught.value.details() or "")["type"] == "unauthorized"
            for values in (["Bearer open", "Bearer no"], ["Bearer no", "Bearer open"]):
                with pytest.raises(grpc.aio.AioRpcError, match="send one"):
                    await stub.GetModel(
                        pb.GetModelRequest(), metadata=[("authorization", one) for one in values]
                    )
            assert not read_messages
            answer = await stub.GetModel(
                pb.GetModelRequest(), metadata=(("authorization", "Bearer open"),)
            )
            assert json.loads(answer.json)["model"] == MODEL.id

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EncoderCalls, "taken", lambda self, sent: read_messages.append(sent))
        asyncio.run(run())
    for api in ("grpc", "grpc_stream"):
        counted = f'encoder_requests_total{{api="{api}",code="UNAUTHENTICATED"}} 1.0'
        assert counted in one.metrics.text()


def test_a_reader_that_stops_is_cut_off_and_others_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rpc, "SEND_SECONDS", 0.5)
    one = service(Fleet())

    async def run() -> None:
        async with listening(one) as (_, stub):
            stopped = stub.EncodeStream(images(60))
            await stopped.read()
            chunks = [chunk async for chunk in stub.EncodeStream(images(60))]
            assert sum(chunk.last for chunk in chunks) == 60
            await asyncio.sleep(1)
            received = 1
            with suppress(grpc.aio.AioRpcError):
                while await stopped.read() is not grpc.aio.EOF:
                    received += 1
            assert received < 50
            assert await stopped.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "has read nothing for 0.5 s" in await stopped.details()

    asyncio.run(run())


async def test_the_answers_of_a_stream_are_limited() -> None:
    async with listening(service(Fleet(), max_response_bytes=LARGE_BYTES)) as (_, stub):
        assert [one.last async for one in stub.EncodeStream(images(1))] == [True]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.EncodeStream(images(2)).read()
        assert json.loads(caught.value.details() or "")["type"] == "too_large"


def test_our_client_opens_connections_as_calls_overlap() -> None:
    peers: list[str] = []
    send = EncoderCalls.send

    async def seen(self: EncoderCalls, document: Document, context: Peer, most_bytes: int) -> None:
        peers.append(context.peer())
        await send(self, document, context, most_bytes)

    async def run() -> None:
        fleet = Fleet()
        async with listening(service(fleet)) as (target, _):
            transport = GrpcTransport(f"grpc://{target}", None, 10)
            for _ in range(3):
                await transport.encode([ITEM], {})
            assert len(set(peers)) == 1
            fleet.seconds = 0.2
            await asyncio.gather(*(transport.encode([ITEM], {}) for _ in range(CONNECTIONS + 1)))
            await transport.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EncoderCalls, "send", seen)
        asyncio.run(run())
    assert len(set(peers)) == CONNECTIONS


def test_our_client_asks_for_large_chunks_of_several_items() -> None:
    sizes: list[int] = []
    send = EncoderCalls.send

    async def seen(self: EncoderCalls, document: Document, context: Peer, most_bytes: int) -> None:
        sizes.append(most_bytes)
        await send(self, document, context, most_bytes)

    async def run() -> None:
        async with listening(service(Fleet())) as (target, _):
            transport = GrpcTransport(f"grpc://{target}", None, 10)
            for count in (1, 2):
                await transport.encode([ITEM] * count, {})
            await transport.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EncoderCalls, "send", seen)
        asyncio.run(run())
    assert sizes == [CHUNK_BYTES, LARGEST_CHUNK_BYTES, LARGEST_CHUNK_BYTES]


def test_answers_count_until_their_call_has_ended() -> None:
    calls = EncoderCalls(
        service(Fleet(), max_response_bytes=LARGE_BYTES, max_unsent_bytes=LARGE_BYTES), 1000
    )
    first, second = Context(), Context()

    async def run() -> None:
        await calls.Encode(images(1), first)
        with pytest.raises(Aborted):
            await calls.Encode(request(), second)
        assert second.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "limits.max_unsent_bytes" in second.details
        for callback in first.ended:
            callback(first)
        await calls.Encode(images(1), second)

    asyncio.run(run())


async def test_a_message_far_over_the_limit_is_refused_by_grpc() -> None:
    async with listening(service(Fleet(), max_body_bytes=1000)) as (_, stub):
        for size_bytes, code in (
            (2000, grpc.StatusCode.INVALID_ARGUMENT),
            (ENVELOPE_BYTES + 1000, grpc.StatusCode.RESOURCE_EXHAUSTED),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Encode(images(1, bytes(size_bytes)))
            assert caught.value.code() is code


async def test_open_services_take_small_messages_only() -> None:
    async with listening(service(Fleet())) as (target, _), grpc.aio.insecure_channel(target) as c:
        for size_bytes, code in (
            (100, grpc.StatusCode.NOT_FOUND),
            (OPEN_BYTES, grpc.StatusCode.INVALID_ARGUMENT),
        ):
            large = health_pb2.HealthCheckRequest(service="a" * size_bytes)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await health_pb2_grpc.HealthStub(c).Check(large)
            assert caught.value.code() is code
        unreadable = c.unary_unary("/grpc.health.v1.Health/Check")
        with pytest.raises(grpc.aio.AioRpcError, match="cannot be parsed"):
            await unreadable(b"\xff")


@pytest.mark.parametrize("method", ["grpc.health.v1.Health/Check", "encoder.v1.Encoder/Encode"])
def test_callers_that_send_nothing_delay_no_small_calls(method: str) -> None:
    async def nothing() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    async def run() -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]  # a connection each
        async with listening(service(Fleet())) as (target, stub):
            others = [grpc.aio.insecure_channel(target, options) for _ in range(8)]
            calls = [one.stream_unary(f"/{method}")(nothing()) for one in others for _ in range(8)]
            await asyncio.sleep(0.3)
            async with grpc.aio.insecure_channel(target, options) as c:
                health = health_pb2_grpc.HealthStub(c)
                answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=2)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            assert (await stub.GetModel(pb.GetModelRequest(), timeout=2)).json
            for call in calls:
                call.cancel()
            for other in others:
                await other.close()

    asyncio.run(run())


class Peer:
    """A context whose message arrives when `sent` is set."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.sent = asyncio.Event()
        self.reading = False

    def peer(self) -> str:
        return self.address

    async def read(self) -> bytes:
        self.reading = True
        await self.sent.wait()
        return b"message"


async def test_few_messages_are_read_at_a_time_and_half_of_them_for_one_connection() -> None:
    reads = Reads(4, 0.3)
    stopped = [Peer("stopped") for _ in range(5)]
    others = [Peer(f"{number}") for number in range(3)]
    calls = [asyncio.create_task(reads.read(one)) for one in (*stopped, *others)]
    await asyncio.sleep(0.01)
    assert [one.reading for one in stopped] == [True, True, False, False, False]
    assert [one.reading for one in others] == [True, True, False]
    for one in others:
        one.sent.set()
    await asyncio.sleep(0.01)
    assert others[2].reading
    assert [await call for call in calls[5:]] == [b"message"] * 3
    for call in calls[:5]:
        with pytest.raises(DeadlineExceeded, match="did not arrive within"):
            await call
    del calls, call
    gc.collect()  # errors keep what was in their frames
    assert len(reads.peers) <= 1, "connections that are gone are remembered"


def test_calls_that_send_nothing_end_when_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_calls, "SHARED_SECONDS", 0.05)

    async def run() -> None:
        reads = Reads(4, 60)
        silent = [Peer(f"{number}") for number in range(4)]
        calls = [asyncio.create_task(reads.read(one)) for one in silent]
        await asyncio.sleep(0.2)
        assert not any(call.done() for call in calls), "nobody else waits"
        other = Peer("another")
        other.sent.set()
        assert await asyncio.wait_for(reads.read(other), 10) == b"message"
        ended = [call for call in calls if call.done()]
        assert ended
        for call in ended:
            with pytest.raises(Overloaded, match="others are waiting"):
                await call
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)

    asyncio.run(run())


def test_a_stream_of_reflection_does_not_delay_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends although the service waits for its next message."""
    monkeypatch.setattr(grpc_calls, "OPEN_SECONDS", 1.0)
    reads = list[OpenReads]()
    read = OpenReads.read

    async def counted(self: OpenReads, context: Any) -> Any:
        reads.append(self)
        return await read(self, context)

    monkeypatch.setattr(OpenReads, "read", counted)

    async def run() -> None:
        (port,) = free_ports(1)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(20):
            async with serving(service(Fleet()), IngressOptions(grpc_port=port)):
                stream = ServerReflectionStub(channel).ServerReflectionInfo()
                await stream.write(ServerReflectionRequest(list_services="*"))
                assert SERVICE.full_name in str(await stream.read())
                while len(reads) < 2:
                    await asyncio.sleep(0.01)
            assert await stream.code() is grpc.StatusCode.DEADLINE_EXCEEDED

    asyncio.run(run())


def test_a_client_that_leaves_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet(seconds=30)
    one = service(fleet)

    async def run() -> None:
        async with listening(one) as (_, stub):
            waiting = stub.Encode(request())
            reading = stub.EncodeStream(images(30))
            while len(fleet.calls) < 1:
                await asyncio.sleep(0.01)
            waiting.cancel()
            fleet.seconds = 0
            async with asyncio.timeout(10):
                while not fleet.cancelled:
                    await asyncio.sleep(0.01)
            reading.cancel()
            reading = stub.EncodeStream(images(30))
            await reading.read()
            reading.cancel()
            async with asyncio.timeout(10):
                while 'api="grpc_stream",code="CANCELLED"' not in one.metrics.text():
                    await asyncio.sleep(0.01)

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    # grpc's poller also calls the closed event loops of earlier tests
    assert all("Event loop is closed" in str(record.exc_info) for record in errors)
    assert one.buffered.held_bytes == 0


async def test_ingresses_share_a_port_and_other_programs_do_not() -> None:
    async with listening(service(Fleet())) as (target, _):
        port = int(target.rpartition(":")[2])
        async with serving(service(Fleet()), IngressOptions(grpc_port=port)):
            pass
        for host in ("127.0.0.1", "0.0.0.0"):
            one = IngressOptions(grpc_host=host, grpc_port=port)
            with pytest.raises(StartError, match="another service on this machine"):
                async with serving(service(Fleet()), one, "another service"):
                    pass
        elsewhere = IngressOptions(grpc_host="127.0.0.2", grpc_port=port)
        async with serving(service(Fleet()), elsewhere, "another service"):
            pass
    with socket.create_server(("127.0.0.1", 0)) as other:
        options = IngressOptions(grpc_port=other.getsockname()[1])
        with pytest.raises(StartError, match=r"another program .* ingress\.grpc_port"):
            async with serving(service(Fleet()), options):
                pass


async def test_a_call_under_way_is_answered_when_the_server_stops() -> None:
    fleet, (port,) = Fleet(seconds=0.5), free_ports(1)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        async with serving(service(fleet), IngressOptions(grpc_port=port)):
            call = EncoderStub(channel).Encode(request())
            while not fleet.calls:
                await asyncio.sleep(0.01)
        assert len((await call).items) == 1


def test_calls_are_limited_and_refused_as_overload() -> None:
    calls = EncoderCalls(service(Fleet()), 0)
    for call in (
        lambda context: calls.Encode(request(), context),
        lambda context: calls.EncodeStream(request(), context),
        lambda context: calls.Fetch(pb.FetchRequest(reference="r1.a"), context),
    ):
        context = Context()
        with pytest.raises(Aborted):
            asyncio.run(call(context))
        assert context.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "ingress.max_ongoing_requests" in context.details
    assert calls.calls == 0
