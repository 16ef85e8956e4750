"""Calls over a socket between a router and an encoder: both ends, in one process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from actors import line
from actors.errors import InvalidMedia, Unavailable
from actors.line_messages import Call
from actors.messages import LENGTH, Messages, connect, listen
from actors.store.shared_memory import INLINE_BYTES
from actors.types import Media, Reply
from router.replicas.fleet import ReplicaDied
from router.replicas.line import Line, Lines, fits
from tests.unit.actors.test_line_messages import CALL, VIDEO, same
from tests.unit.fleet import embedding, item

Encode = Callable[[Call], Coroutine[Any, Any, Reply]]
Test = Coroutine[Any, Any, None]


async def well(call: Call) -> Reply:
    """An encoder's answers."""
    await asyncio.sleep(0)
    return Reply([embedding(one, "a") for one in call.media], 7)


@asynccontextmanager
async def opened(encode: Encode) -> AsyncGenerator[tuple[line.Lines, Line]]:
    """Both ends."""
    encoder, router = line.Lines(encode), Lines()
    there = {"line": await encoder.open()}
    assert router.to("a", there) is None, "not yet"
    async with asyncio.timeout(10):
        while not (found := router.to("a", there)):
            await asyncio.sleep(0)
    yield encoder, found
    router.keep({})
    await encoder.close()


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Test], None]:
    """In a loop of each kind that there is."""

    def run(test: Test) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(test)

    return run


@given(st.lists(st.binary(max_size=50)), st.randoms())
def test_messages_come_whole_however_they_are_cut(messages: list[bytes], random: Any) -> None:
    heard: list[bytes] = []
    end = Messages(heard.append, lambda: None)
    sent = b"".join(LENGTH.pack(len(one)) + one for one in messages)
    while sent:
        size = random.randint(1, len(sent))
        end.data_received(sent[:size])
        sent = sent[size:]
    assert heard == messages


def test_calls_are_answered_in_any_order(run: Callable[[Test], None]) -> None:
    async def test() -> None:
        gate = asyncio.Event()

        async def encode(call: Call) -> Reply:
            if call.keep:
                await gate.wait()
            return await well(call)

        async with opened(encode) as (_, near):
            slow = near.call(replace(CALL, keep=True))
            reply = await near.call(CALL)
            assert reply.outstanding_patches == 7
            assert all(map(same, reply.answers, (await well(CALL)).answers))
            gate.set()
            assert len((await slow).answers) == 2

    run(test())


def test_a_call_that_fails_says_so(run: Callable[[Test], None]) -> None:
    async def test() -> None:
        async def encode(call: Call) -> Reply:
            raise InvalidMedia("all of it")

        async with opened(encode) as (_, near):
            with pytest.raises(InvalidMedia, match="all of it"):
                await near.call(CALL)

    run(test())


def test_what_nobody_waits_for_ends(run: Callable[[Test], None]) -> None:
    async def test() -> None:
        began, ended = asyncio.Event(), asyncio.Event()

        async def encode(call: Call) -> Reply:
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            return Reply([], 0)

        async with opened(encode) as (encoder, near), asyncio.timeout(10):
            call = near.call(CALL)
            await began.wait()
            call.cancel()
            await ended.wait()
            ended.clear()
            near.call(CALL)
            await asyncio.sleep(0.05)
            near._messages.close()  # the router ends
            await ended.wait()
            while encoder._lines:
                await asyncio.sleep(0)

    run(test())


def test_a_dead_encoders_calls_are_lost_at_once(run: Callable[[Test], None]) -> None:
    async def test() -> None:
        async def encode(call: Call) -> Reply:
            for each in encoder._lines:
                each.messages.close()
            await asyncio.Event().wait()
            return Reply([], 0)

        async with opened(encode) as (encoder, near), asyncio.timeout(10):
            calls = [near.call(CALL) for _ in range(2)]
            for call in calls:
                with pytest.raises(ReplicaDied):
                    await call
            assert not near.open

    run(test())


def test_an_encoder_that_stops_ends_what_it_has_and_takes_no_more(
    run: Callable[[Test], None],
) -> None:
    async def test() -> None:
        began, gate = asyncio.Event(), asyncio.Event()

        async def encode(call: Call) -> Reply:
            began.set()
            await gate.wait()
            return await well(call)

        async with opened(encode) as (encoder, near), asyncio.timeout(10):
            first = near.call(CALL)
            await began.wait()
            address = encoder.address
            closing = asyncio.create_task(encoder.close())
            await asyncio.sleep(0)
            with pytest.raises(Unavailable):
                await near.call(CALL)
            assert connect(address) is None
            assert not closing.done()
            gate.set()
            assert len((await first).answers) == 2
            await closing

    run(test())


def test_only_processes_of_the_same_user_are_listened_to(monkeypatch: pytest.MonkeyPatch) -> None:
    listening, address = listen()
    with listening:
        listening.listen()
        near = connect(address)
        assert near
        near.close()
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        assert connect(address) is None
    assert connect(address) is None, "nobody is there"


@pytest.mark.parametrize(
    ("media", "keep", "near"),
    [
        (item(1), False, True),
        (item(1, patches=4 * 600), False, False),
        (item(1, patches=4 * 600), True, True),
        (replace(item(1), data=bytes(INLINE_BYTES + 1)), True, False),
        (replace(VIDEO, frames=(bytes(INLINE_BYTES),)), True, False),
        (replace(item(1), on_device=True), True, False),
    ],
    ids=["small", "large answer", "kept", "large file", "large frames", "on the device"],
)
def test_small_calls_alone_go_over_a_line(media: Media, keep: bool, near: bool) -> None:
    call = replace(CALL, media=[media], keep=keep)
    assert fits(call, {"width": 1000}) == near


def test_a_replica_that_is_gone_from_the_list_still_answers(run: Callable[[Test], None]) -> None:
    async def test() -> None:
        gate = asyncio.Event()

        async def encode(call: Call) -> Reply:
            await gate.wait()
            return await well(call)

        encoder, router = line.Lines(encode), Lines()
        there = {"line": await encoder.open()}
        async with asyncio.timeout(10):
            while not (near := router.to("a", there)):
                await asyncio.sleep(0)
            call = near.call(CALL)
            router.keep({})
            await asyncio.sleep(0.05)
            gate.set()
            assert len((await call).answers) == 2
            while encoder._lines:
                await asyncio.sleep(0)
        assert not near.open
        await encoder.close()

    run(test())


def test_a_line_that_breaks_while_it_opens_takes_no_calls(run: Callable[[Test], None]) -> None:
    async def test() -> None:
        listening, address = listen()
        listening.listen()
        near = Line()
        opening = asyncio.create_task(near.begin(address))
        await asyncio.sleep(0)
        listening.close()
        await opening
        async with asyncio.timeout(10):
            while near.open:
                await asyncio.sleep(0)
        unreachable = Line()
        await unreachable.begin(address)
        assert not unreachable.open

    run(test())


def test_a_call_that_gives_itself_up_is_told(run: Callable[[Test], None]) -> None:
    async def test() -> None:
        async def encode(call: Call) -> Reply:
            raise asyncio.CancelledError

        async with opened(encode) as (_, near), asyncio.timeout(10):
            with pytest.raises(Unavailable):
                await near.call(CALL)

    run(test())


def test_a_process_that_hangs_is_sent_no_more_than_a_few_megabytes(
    run: Callable[[Test], None],
) -> None:
    async def test() -> None:
        listening, address = listen()
        with listening:
            listening.listen()  # and never reads
            near = Line()
            await near.begin(address)
            large = replace(CALL, media=[replace(item(1), data=bytes(INLINE_BYTES))])
            sent = 0
            while near.open:
                near.call(large).cancel()
                sent += 1
                assert sent < 10
            near._messages.abort()
            await asyncio.sleep(0)

    run(test())
