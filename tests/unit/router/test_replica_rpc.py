"""Calls between a router and an encoder over real sockets: who may call, and how calls end."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import tracemalloc
import weakref
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from actors.errors import DeadlineExceeded, InvalidMedia, ServiceError, TooLarge, Unavailable
from actors.rows.lending import Lender
from actors.rows.reader import RowsReader
from actors.rows.server import RowsServer
from actors.rpc import replica_pb2 as pb
from actors.rpc import server as rpc_server
from actors.rpc.codec import VERSION, EncodeCall, ReceivedRows, message_fields, reply_of
from actors.rpc.server import (
    METADATA_KEY,
    TICKETS,
    Endpoint,
    ReplicaServer,
    RouterStream,
    make_directory,
    take,
)
from actors.store.kept import Kept
from actors.store.shared_memory import INLINE_BYTES
from actors.telemetry.tracing import Origin
from actors.types import Bytes, Dtype, Embedding, Media, Reply, SharedBytes, Work
from router.replicas.fleet import Replica, ReplicaDied, ReplicaUnreachable, ShardLost
from router.replicas.rpc import STOPPED, ReplicaChannel, failure
from tests.unit.fleet import embedding, item, right
from tests.unit.rows.kept import Dictionary

NODE = "node"
CALL = EncodeCall([item(1), item(2)], "float16", 3.5, Origin("an id", "a trace"), keep=False)
TELLING = replace(CALL, tell=True)
SECONDS = 20
NOTHING = grpc.aio.Metadata()
ROWS = np.zeros(1001, np.uint8)
LARGE_BYTES = 64 * 2**20
LARGE_CALL = replace(CALL, media=[replace(item(1), data=bytes(LARGE_BYTES))])


class MemoryEncoder:
    """An encoder whose calls wait for `gate`."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.began, self.ended = asyncio.Event(), asyncio.Event()
        self.calls: list[tuple[Any, ...]] = []
        self.failure: BaseException | None = None
        self.rows: dict[str, SharedBytes | Bytes] = {}
        """By digest: those that are not in the message."""
        self.kept: dict[str, Kept] = {}
        self.outstanding = Work(0)
        self.parts = asyncio.Semaphore(0)
        """Released for each item that is to be answered early."""

    async def encode(
        self,
        media: list[Media],
        dtype: Dtype,
        timeout_seconds: float,
        origin: Origin,
        keep: bool,
        waiting_per_sent: float,
        early: Callable[[Reply], None] | None,
        lend: bool,
    ) -> Reply:
        self.calls.append((media, dtype, timeout_seconds, origin, keep, waiting_per_sent))
        self.began.set()
        answers = [embedding(one, "a") for one in media]
        answers = [
            replace(answer, data=self.rows.get(one.digest, answer.data))
            for one, answer in zip(media, answers, strict=True)
        ]
        places = tuple(range(len(media))) if early else ()
        work = Work.of(one.plan.work for one in media)
        self.outstanding = Work.of([self.outstanding, work])
        try:
            while early and len(answers) > 1:
                await self.parts.acquire()
                early(Reply([answers.pop(0)], 0, 0, places[:1]))
                places = places[1:]
            await self.gate.wait()
        finally:
            self.outstanding = self.outstanding.without(work)
            self.ended.set()
        if self.failure:
            raise self.failure
        return Reply([*answers], 7, 0, places)

    async def fetch(self, name: str) -> Kept | None:
        return self.kept.get(name)

    async def release(self, name: str) -> bool:
        return self.kept.pop(name, None) is not None

    async def check_health(self) -> None:
        if self.failure:
            raise self.failure


@asynccontextmanager
async def opened(
    near: bool = True,
) -> AsyncGenerator[tuple[MemoryEncoder, ReplicaServer, ReplicaChannel]]:
    """Both ends. `near`: over the unix socket, else over TCP."""
    encoder = MemoryEncoder()
    server = ReplicaServer(encoder)
    endpoint = await server.start(NODE, "127.0.0.1", "actor")
    channel = ReplicaChannel(endpoint, NODE if near else "another node")
    async with asyncio.timeout(SECONDS):
        yield encoder, server, channel
        channel.retire()
        encoder.gate.set()
        await server.stop(SECONDS)


async def encode(channel: ReplicaChannel, call: EncodeCall = CALL, seconds: float = 10) -> Reply:
    message, _ = await channel.call("encode", message_fields(call), seconds)
    return reply_of(message, ReceivedRows())


@pytest.fixture(params=[True, False], ids=["unix", "tcp"])
def near(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


async def test_all_calls_over_both_sockets(near: bool) -> None:
    async with opened(near) as (encoder, _, channel):
        reply = await encode(channel)
        assert reply.outstanding_patches == 7
        assert encoder.calls == [(CALL.media, "float16", 3.5, CALL.origin, False, 0)]
        await channel.call("check", {})
        encoder.kept["x"] = Kept.of(item(1), embedding(item(1), "a"))
        found, _ = await channel.call("fetch", {"name": "x"})
        assert found.kept.media.digest == item(1).digest
        found, _ = await channel.call("fetch", {"name": "y"})
        assert not found.HasField("kept")
        for released in (True, False):
            found, _ = await channel.call("release", {"name": "x"})
            assert found.released == released
        path = Path(channel.endpoint.unix)
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        if near:  # it works without TCP: the address is a wrong one
            lone = ReplicaChannel(replace(channel.endpoint, tcp="127.0.0.1:1"), NODE)
            assert len((await encode(lone)).answers) == 2
            lone.retire()


@pytest.mark.parametrize("fails", [False, True])
async def test_answers_come_early_and_in_order(near: bool, fails: bool) -> None:
    async with opened(near) as (encoder, _, channel):
        call = replace(CALL, media=[item(n) for n in range(3)], early=True)
        found: list[Reply] = []
        heard = asyncio.Event()

        async def early(message: Any, _: list[Bytes]) -> None:
            found.append(reply_of(message, ReceivedRows()))
            heard.set()

        encoder.gate.clear()
        fields = message_fields(call)
        calling = asyncio.create_task(channel.call("encode", fields, 10, early))
        for count in (1, 2):
            encoder.parts.release()
            await heard.wait()
            heard.clear()
            assert [part.places for part in found] == [(n,) for n in range(count)]
        encoder.failure = InvalidMedia("the rest") if fails else None
        encoder.gate.set()
        if fails:
            with pytest.raises(InvalidMedia):
                await calling
        else:
            message, _ = await calling
            found.append(reply_of(message, ReceivedRows()))
            assert found[-1].places == (2,)
            assert found[-1].outstanding_patches == 7
        for place, part in enumerate(found):
            assert right([item(place)], part.answers)


@pytest.mark.parametrize("meanwhile", [False, True], ids=["waits", "takes"])
async def test_a_call_that_is_cancelled_between_its_answers_ends_at_the_encoder(
    meanwhile: bool,
) -> None:
    async with opened() as (encoder, _, channel):
        heard, going_on = asyncio.Event(), asyncio.Event()

        async def early(*_: Any) -> None:
            heard.set()
            if meanwhile:
                await going_on.wait()

        fields = message_fields(replace(CALL, early=True))
        encoder.gate.clear()
        encoder.parts.release()
        calling = asyncio.create_task(channel.call("encode", fields, 10, early))
        await heard.wait()
        calling.cancel()
        await encoder.ended.wait()
        assert (await asyncio.wait([calling]))[0].pop().cancelled()
        encoder.gate.set()
        assert len((await encode(channel)).answers) == 2, "the stream goes on"


@pytest.mark.parametrize("ends_well", [True, False])
async def test_a_router_that_asks_hears_of_the_items_of_others(near: bool, ends_well: bool) -> None:
    """Of those that come, and that none are left."""
    async with opened(near) as (encoder, _, channel):
        told: asyncio.Queue[Work] = asyncio.Queue()
        untold: list[Work] = []
        listener = ReplicaChannel(channel.endpoint, NODE if near else "", told.put_nowait)
        deaf = ReplicaChannel(channel.endpoint, NODE if near else "", untold.append)
        await encode(listener, TELLING)
        await encode(deaf)
        while await told.get() != Work(0):  # the items of `deaf` came and went
            pass
        encoder.gate.clear()
        calls = [asyncio.create_task(encode(channel, TELLING)) for _ in range(3)]
        whole = Work.of(one.plan.work for one in 3 * CALL.media)
        while await told.get() != whole:  # unless all came within a millisecond
            pass
        if ends_well:
            encoder.gate.set()
            assert len(await asyncio.gather(*calls)) == 3
        else:
            for call in calls:
                call.cancel()
        while await told.get() != Work(0):
            pass
        encoder.gate.set()
        await encode(listener)  # which asks no more
        await encode(channel)
        await asyncio.sleep(10 * rpc_server.TELL_SECONDS)
        assert told.empty()
        assert not untold
        listener.retire()
        deaf.retire()


async def test_what_a_replica_has_to_do_is_told_after_answers_that_take_long_to_send() -> None:
    """Not left out: the router would count items of others that are long done."""
    async with opened() as (encoder, server, channel):
        told: asyncio.Queue[Work] = asyncio.Queue()
        listener = ReplicaChannel(channel.endpoint, NODE, told.put_nowait)
        await encode(listener, TELLING)
        (stream,) = server._streams
        for _ in range(2):
            stream.send(pb.Outcome(error={"message": LARGE_BYTES * "x"}))
        encoder.outstanding = Work(5)
        stream.tell_soon()
        await asyncio.sleep(2 * rpc_server.TELL_SECONDS)
        encoder.outstanding = Work(0)
        assert await told.get() == Work(0)
        listener.retire()


async def test_a_call_without_the_token_is_refused_before_it_is_read(near: bool) -> None:
    async with opened(near) as (encoder, _, channel):
        node = NODE if near else ""
        for token in ("", "wrong", channel.endpoint.token[:-1]):
            stranger = ReplicaChannel(replace(channel.endpoint, token=token), node)
            large = replace(CALL, media=[replace(item(1), data=bytes(64 * 2**20))])
            with pytest.raises(ShardLost, match="token"):
                await encode(stranger)
            with pytest.raises(ShardLost):
                await encode(stranger, large)
            stranger.retire()
        target = f"unix:{channel.endpoint.unix}" if near else channel.endpoint.tcp
        async with grpc.aio.insecure_channel(target) as bare:
            call = bare.stream_stream("/encoder.replica.v1.Replica/Calls")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(iter([b"no message"])).read()
        # gRPC may forget the reason if the stream ends while a message is being written.
        refusals = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INTERNAL)
        assert refused.value.code() in refusals
        assert not encoder.calls
        assert channel.endpoint.token not in repr(channel.endpoint)


def test_a_router_does_not_use_another_version() -> None:
    endpoint = Endpoint(NODE, "/nowhere", "127.0.0.1:1", "actor", "secret")
    said = {"fingerprint": "f", **endpoint.metadata}
    found = Replica.of(said, {"outstanding_patches": 3, "outstanding_pairs": 9})
    assert found == Replica({"fingerprint": "f"}, 3, endpoint, 9), "the token is not shown"
    newer = {**said, METADATA_KEY: {"version": VERSION + 1, "address": "x"}}
    assert Replica.of(newer, {}).endpoint is None
    assert Replica.of({}, {}).endpoint is None


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (InvalidMedia("all of it"), InvalidMedia),
        (InvalidMedia("ü" * 10_000), InvalidMedia),
        (ValueError("boom"), ServiceError),
        (asyncio.CancelledError(), Unavailable),
    ],
    ids=["ours", "long", "a bug", "dropped"],
)
async def test_a_call_that_fails_says_so(raised: BaseException, told: type[Exception]) -> None:
    async with opened() as (encoder, _, channel):
        encoder.failure = raised
        with pytest.raises(told) as found:
            await encode(channel)
        assert str(raised)[:1000] in str(found.value)
        with pytest.raises(told):
            await channel.call("check", {})


async def test_a_cancelled_call_ends_at_the_encoder(near: bool) -> None:
    async with opened(near) as (encoder, _, channel):
        encoder.gate.clear()
        call = asyncio.create_task(encode(channel))
        await encoder.began.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await encoder.ended.wait()


def test_nothing_of_a_cancelled_call_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its frames refer to rows."""
    tasks: list[weakref.ref[asyncio.Task[None]]] = []
    answer = RouterStream._answer

    async def noted(*call: Any) -> None:
        task = asyncio.current_task()
        assert task
        tasks.append(weakref.ref(task))
        del task
        await answer(*call)

    monkeypatch.setattr(RouterStream, "_answer", noted)

    async def test() -> None:
        async with opened() as (encoder, _, channel):
            encoder.gate.clear()
            call = asyncio.create_task(encode(channel))
            await encoder.began.wait()
            call.cancel()
            await encoder.ended.wait()
            while any(task() for task in tasks):
                await asyncio.sleep(0.01)

    asyncio.run(test())


async def test_a_call_has_a_deadline() -> None:
    async with opened() as (encoder, _, channel):
        encoder.gate.clear()
        with pytest.raises(DeadlineExceeded):
            await encode(channel, seconds=0.1)
        await encoder.ended.wait()


@pytest.mark.parametrize(
    ("failure", "raised"),
    [(None, False), (errno.ECONNREFUSED, False), (errno.EMFILE, False), (errno.EHOSTUNREACH, True)],
)
def test_only_a_node_that_is_cut_off_is_out_of_reach(
    failure: int | None, raised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: Any) -> None:
        raise OSError(failure, "")

    async def test() -> None:
        async with opened(near=False) as (_, _, channel):
            if failure:
                monkeypatch.setattr(asyncio, "open_connection", fails)
            with pytest.raises(OSError, match=str(failure)) if raised else nullcontext():
                await channel.reach()

    asyncio.run(test())


async def test_messages_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened() as (encoder, _, channel):
        encoder.gate.clear()
        other = asyncio.create_task(encode(channel))
        await encoder.began.wait()
        monkeypatch.setattr(rpc_server, "MAX_MESSAGE_BYTES", 1000)
        large = replace(CALL, media=[replace(item(1), data=bytes(1001))])
        with pytest.raises(TooLarge, match="1000 of a call"):
            await encode(channel, large)
        assert len(encoder.calls) == 1
        encoder.kept["x"] = Kept.of(item(1), replace(embedding(item(1), "a"), data=ROWS))
        with pytest.raises(TooLarge, match="1000 of a call"):
            await channel.call("fetch", {"name": "x"})
        encoder.gate.set()
        assert (await other).answers, "the stream goes on"


async def test_a_drained_replica_answers_what_it_has_and_takes_no_more(near: bool) -> None:
    async with opened(near) as (encoder, server, channel):
        encoder.gate.clear()
        call = asyncio.create_task(encode(channel))
        await encoder.began.wait()
        stopping = asyncio.create_task(server.stop(SECONDS))
        await asyncio.sleep(0.05)
        with pytest.raises(Unavailable, match="stopping"):
            await encode(channel)
        channel.retire()  # the router hears that it is gone: the call goes on
        assert not stopping.done()
        encoder.gate.set()
        assert len((await call).answers) == 2
        await stopping
        assert not Path(channel.endpoint.unix).parent.exists()


async def test_a_call_that_outlasts_the_drain_is_lost() -> None:
    async with opened() as (encoder, server, channel):
        encoder.gate.clear()
        call = asyncio.create_task(encode(channel))
        await encoder.began.wait()
        await server.stop(0.05)
        with pytest.raises((ShardLost, Unavailable)):
            await call
        await encoder.ended.wait()


async def test_rows_in_shared_memory_are_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened() as (encoder, _, channel):
        rows = SharedBytes(object(), 2 * INLINE_BYTES)
        encoder.rows[item(2).digest] = rows
        request = message_fields(CALL)
        message, _ = await channel.call("encode", request)
        assert take(None, [message.ticket, "unknown"]) == [[rows], None]
        assert take(None, [message.ticket]) == [None]
        monkeypatch.setattr(rpc_server, "TICKET_SECONDS", 0.05)
        abandoned, _ = await channel.call("encode", request)
        assert abandoned.ticket in TICKETS
        await asyncio.sleep(0.1)
        assert abandoned.ticket not in TICKETS, "nothing is held for a router that is gone"


@asynccontextmanager
async def lending() -> AsyncGenerator[tuple[MemoryEncoder, Lender, ReplicaChannel]]:
    """An encoder whose second item's rows can be lent, and a router that borrows them."""
    encoder, lender = MemoryEncoder(), Lender(8 * INLINE_BYTES)
    rows = lender.block(2 * INLINE_BYTES)
    assert rows is not None
    rows[:] = np.arange(len(rows)) % 251
    encoder.rows[item(2).digest] = rows
    del rows
    server = ReplicaServer(encoder, lender=lender)
    endpoint = await server.start(NODE, "127.0.0.1", "actor")
    channel = ReplicaChannel(endpoint, NODE, borrows=True)
    async with asyncio.timeout(SECONDS):
        yield encoder, lender, channel
        channel.retire()
        await server.stop(SECONDS)


BORROWING = replace(CALL, borrower=os.getpid())


async def test_large_rows_are_lent_and_given_back() -> None:
    async with lending() as (encoder, lender, channel):
        message, lent = await channel.call("encode", message_fields(BORROWING))
        assert (message.ticket, len(lent), lender.loans) == ("", 1, 1)
        small, large = reply_of(message, ReceivedRows(lent=lent)).answers
        assert isinstance(small, Embedding)
        assert isinstance(large, Embedding)
        assert large.data is lent[0]
        assert lent[0].tobytes() == bytes(n % 251 for n in range(2 * INLINE_BYTES))
        assert not lent[0].flags.writeable
        encoder.rows.clear()
        assert lender.taken_bytes == 2 * INLINE_BYTES, "the router has them"
        del large, lent
        assert (lender.loans, lender.taken_bytes) == (0, 0)


async def test_rows_that_nobody_waits_for_are_given_back() -> None:
    async with lending() as (_, lender, channel):
        request = message_fields(BORROWING)
        for patience in range(40):
            call = asyncio.create_task(channel.call("encode", request))
            await asyncio.wait([call], timeout=patience / 10_000)
            call.cancel()
            await asyncio.wait([call])
            del call
        while lender.loans:
            await asyncio.sleep(0.01)


async def test_lent_rows_of_an_early_part_are_given_back_before_the_next() -> None:
    async with lending() as (encoder, lender, channel):
        encoder.gate.clear()
        heard = asyncio.Event()

        async def early(message: Any, lent: list[Bytes]) -> None:
            if lent:
                heard.set()

        request = message_fields(replace(BORROWING, early=True, media=[item(2), item(1)]))
        call = asyncio.create_task(channel.call("encode", request, early=early))
        encoder.parts.release()
        await heard.wait()
        while lender.loans:
            await asyncio.sleep(0.01)
        encoder.gate.set()
        await call


@pytest.mark.parametrize("steps", range(12))
async def test_loans_that_the_router_never_hears_of_end_with_its_next_stream(steps: int) -> None:
    """Its stream breaks somewhere between the answer and its arrival."""
    async with lending() as (encoder, lender, channel):
        request = message_fields(BORROWING)
        encoder.gate.clear()
        call = asyncio.create_task(channel.call("encode", request))
        await encoder.began.wait()
        encoder.gate.set()
        for _ in range(steps):
            await asyncio.sleep(0)
        channel._streams[False]._reader.cancel()
        await asyncio.wait([call])
        del call
        message, lent = await channel.call("encode", request)
        assert lent[0].tobytes() == bytes(n % 251 for n in range(2 * INLINE_BYTES))
        del message, lent
        while lender.loans:
            await asyncio.sleep(0.01)


async def test_loans_of_an_answer_that_is_too_large_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async with lending() as (encoder, lender, channel):
        encoder.rows[item(1).digest] = np.zeros(INLINE_BYTES, np.uint8)
        monkeypatch.setattr(rpc_server, "MAX_MESSAGE_BYTES", INLINE_BYTES)
        with pytest.raises(TooLarge):
            await channel.call("encode", message_fields(BORROWING))
        assert lender.loans == 0
        del encoder.rows[item(1).digest]
        assert (await channel.call("encode", message_fields(BORROWING)))[1]


async def test_rows_are_not_lent_where_they_cannot_be_read() -> None:
    async with lending() as (_, lender, channel):
        endpoint = channel.endpoint
        assert endpoint.memory
        assert Endpoint.of(endpoint.metadata) == endpoint
        elsewhere = replace(endpoint, memory=replace(endpoint.memory, check="0" * 64))
        assert ReplicaChannel(elsewhere, NODE, borrows=True).borrower is None
        assert ReplicaChannel(endpoint, "another node", borrows=True).borrower is None
        assert ReplicaChannel(endpoint, NODE).borrower is None
        assert not lender.loans


async def test_rows_can_be_read_until_the_last_call_has_ended() -> None:
    store = Dictionary()
    name = store.keep(torch.ones(2, 4))
    encoder = MemoryEncoder()
    encoder.gate.clear()
    server = ReplicaServer(encoder, RowsServer(store))
    endpoint = await server.start(NODE, "127.0.0.1", "actor")
    channel = ReplicaChannel(endpoint, NODE)
    calling = asyncio.create_task(encode(channel))
    await encoder.began.wait()
    stopping = asyncio.create_task(server.stop(SECONDS))
    await asyncio.sleep(0.1)
    reader = await asyncio.to_thread(RowsReader.connect, endpoint.rows)
    assert reader
    assert reader.hold(name).shape == (2, 4)
    reader.close()
    encoder.gate.set()
    await calling
    await stopping
    assert RowsReader.connect(endpoint.rows) is None


CHILD = """
import asyncio, json, sys
from tests.unit.router.test_replica_rpc import MemoryEncoder, NODE, ReplicaServer

async def main():
    encoder = MemoryEncoder()
    if sys.argv[1] == "held":
        encoder.gate.clear()
    endpoint = await ReplicaServer(encoder).start(NODE, "127.0.0.1", "actor")
    print(json.dumps(endpoint.metadata), flush=True)
    await encoder.began.wait()
    print("began", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@asynccontextmanager
async def child(kind: str) -> AsyncGenerator[tuple[asyncio.subprocess.Process, Endpoint]]:
    """A server in a process of its own; `held`: it never answers."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CHILD, kind, stdout=subprocess.PIPE
    )
    assert process.stdout
    try:
        endpoint = Endpoint.of(json.loads(await process.stdout.readline()))
        assert endpoint
        yield process, endpoint
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_killed_replica_is_told_from_one_that_was_dead_before(near: bool) -> None:
    async with asyncio.timeout(60), child("held") as (process, endpoint):
        channel = ReplicaChannel(endpoint, NODE if near else "")
        calls = [asyncio.create_task(encode(channel)) for _ in range(2)]
        assert process.stdout
        assert await process.stdout.readline() == b"began\n"
        process.kill()
        died = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(died[0], ReplicaDied)
        assert died[0] is not died[1], "a traceback of its own"
        with pytest.raises(ReplicaUnreachable):
            await encode(channel)
        channel.retire()


async def test_a_replica_that_hangs_answers_again_when_it_goes_on(near: bool) -> None:
    async with asyncio.timeout(60), child("well") as (process, endpoint):
        channel = ReplicaChannel(endpoint, NODE if near else "")
        await encode(channel)
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(DeadlineExceeded):
            await encode(channel, seconds=0.3)
        os.kill(process.pid, signal.SIGCONT)
        assert len((await encode(channel)).answers) == 2
        channel.retire()


async def test_a_channel_that_broke_is_opened_again() -> None:
    async with asyncio.timeout(60), child("well") as (_, endpoint):
        open_: list[asyncio.StreamWriter] = []

        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            host, port = endpoint.tcp.split(":")
            there, back = await asyncio.open_connection(host, port)
            open_.extend([writer, back])

            async def copy(one: asyncio.StreamReader, other: asyncio.StreamWriter) -> None:
                with suppress(ConnectionError):
                    while data := await one.read(65536):
                        other.write(data)

            await asyncio.gather(copy(reader, back), copy(there, writer))

        proxy = await asyncio.start_server(forward, "127.0.0.1", 0)
        port = proxy.sockets[0].getsockname()[1]
        channel = ReplicaChannel(replace(endpoint, tcp=f"127.0.0.1:{port}"), "")
        await encode(channel)
        for writer in open_:
            writer.transport.abort()
        async with asyncio.timeout(20):
            while True:
                try:
                    await encode(channel)
                    break
                except ShardLost:
                    await asyncio.sleep(0.05)
        channel.retire()
        proxy.close()
        for writer in open_:
            writer.transport.abort()
        await asyncio.sleep(0.05)


async def test_a_health_check_does_not_wait_for_a_large_call(near: bool) -> None:
    async with opened(near) as (_, _, channel):
        for _ in range(2):  # the second time over streams that are open
            call = asyncio.create_task(encode(channel, LARGE_CALL))
            await asyncio.sleep(0.01)
            await channel.call("check", {})
            assert not call.done()
            await call


async def test_calls_that_nobody_waits_for_are_not_kept_for_a_replica_that_hangs() -> None:
    async with asyncio.timeout(60), child("well") as (process, endpoint):
        channel = ReplicaChannel(endpoint, NODE)
        await encode(channel)
        os.kill(process.pid, signal.SIGSTOP)
        tracemalloc.start()
        for _ in range(6):
            with pytest.raises(DeadlineExceeded):
                await encode(channel, LARGE_CALL, seconds=0.1)
        held_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert held_bytes < 3 * LARGE_BYTES, "the one that is being sent, and perhaps the last"
        channel.retire()


async def test_a_call_that_was_never_sent_has_not_begun() -> None:
    async with asyncio.timeout(60), child("well") as (process, endpoint):
        channel = ReplicaChannel(endpoint, NODE)
        await encode(channel)
        os.kill(process.pid, signal.SIGSTOP)
        first = asyncio.create_task(encode(channel, LARGE_CALL))
        second = asyncio.create_task(encode(channel))
        await asyncio.sleep(0.2)
        process.kill()
        with pytest.raises(ReplicaUnreachable):
            await second
        with pytest.raises(ShardLost) as lost:
            await first
        assert type(lost.value) is not ReplicaUnreachable
        channel.retire()


async def test_large_messages_are_not_kept_after_they_were_answered(near: bool) -> None:
    async with opened(near) as (encoder, _, channel):
        await encode(channel)
        tracemalloc.start()
        await encode(channel, LARGE_CALL)
        encoder.calls.clear()
        data = np.zeros(LARGE_BYTES, np.uint8)
        encoder.kept["x"] = Kept.of(item(1), replace(embedding(item(1), "a"), data=data))
        await channel.call("fetch", {"name": "x"})
        encoder.kept.clear()
        del data
        await asyncio.sleep(0.1)
        held_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert held_bytes < LARGE_BYTES / 2


def test_answers_that_cannot_be_read_end_the_calls() -> None:
    async def answers(calls: Any, context: grpc.aio.ServicerContext) -> AsyncGenerator[bytes]:
        async for _ in calls:
            yield b"\xff"

    async def test() -> None:
        server = grpc.aio.server()
        handler = grpc.stream_stream_rpc_method_handler(answers)
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(rpc_server.SERVICE, {rpc_server.METHOD: handler})]
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        channel = ReplicaChannel(Endpoint("", "", f"127.0.0.1:{port}", "actor", "token"), NODE)
        for _ in range(2):
            with pytest.raises(ShardLost):
                await encode(channel, seconds=5)
        channel.retire()
        await server.stop(0)

    asyncio.run(test())


def test_sockets_of_replicas_that_were_killed_are_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))

    async def test() -> None:
        async with child("well") as (process, left), opened() as (_, _, channel):
            process.kill()
            await process.wait()
            alive = Path(channel.endpoint.unix)
            dead = make_directory() / rpc_server.SOCKET_NAME
            os.rename(left.unix, dead)
            make_directory()
            assert dead.exists(), "it is new: perhaps nobody listens yet"
            for path in (alive, dead):
                os.utime(path, (0, 0))
            make_directory()
            assert alive.exists()
            assert not dead.parent.exists()

    asyncio.run(test())


def test_a_long_temporary_directory_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/tmp/" + "x" * 90)
    directory = make_directory()
    assert directory.parent == Path("/tmp")
    directory.rmdir()


async def test_inline_rows_are_read_only() -> None:
    async with opened() as (_, _, channel):
        first, _ = (await encode(channel)).answers
        data: Any = first.data  # type: ignore[union-attr]
        assert isinstance(data, np.ndarray)
        assert not data.flags.writeable


def test_the_end_of_a_drain_is_no_death() -> None:
    stopped, died = (
        grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, NOTHING, NOTHING, details)
        for details in (STOPPED, "Socket closed")
    )
    assert type(failure(stopped, begun=True)) is ShardLost
    assert type(failure(died, begun=True)) is ReplicaDied
    assert type(failure(died, begun=False)) is ReplicaUnreachable
    unknown = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, NOTHING, NOTHING, "a write failed")
    assert type(failure(unknown, begun=True)) is ShardLost
