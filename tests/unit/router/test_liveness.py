"""Replicas that hang are told from replicas that have much to do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from actors.errors import Unavailable
from actors.types import Answer, Media
from router.dispatch import Dispatcher
from router.replicas import liveness as liveness_module
from router.replicas.fleet import ShardLost
from router.replicas.liveness import Liveness
from tests.unit.fleet import MemoryFleet, collect, dispatcher, item, right, settled, well

STALL_SECONDS = 0.1
PATIENT_SECONDS = 60.0


async def at_once(replica: str) -> None:
    """It answers."""


async def never(replica: str) -> None:
    await asyncio.Event().wait()


def test_what_a_hung_replica_had_is_encoded_elsewhere_and_it_gets_nothing_more() -> None:
    async def a_hangs(replica: str, media: list[Media], timeout_seconds: float) -> list[Answer]:
        if replica in fleet.hung:
            await asyncio.Event().wait()
        return await well(replica, media, timeout_seconds)

    fleet = MemoryFleet("ab", a_hangs)
    fleet.hung.add("a")

    async def test() -> Dispatcher:
        router, _ = dispatcher(fleet, stall_seconds=STALL_SECONDS, exclude_seconds=0)
        media = [item(0), item(1)]
        assert right(media, await collect(router, media, PATIENT_SECONDS))
        assert [replica for replica, _ in fleet.calls] == ["a", "b", "b"]
        assert fleet.cancelled == 1
        assert right([item(2)], await collect(router, [item(2)], PATIENT_SECONDS))
        assert fleet.calls[-1][0] == "b"
        fleet.hung.clear()
        number = 3
        while fleet.calls[-1][0] != "a":
            await collect(router, [item(number)], PATIENT_SECONDS)
            await asyncio.sleep(0.01)
            number += 1
        return router

    settled(test())


def test_a_call_may_take_long_where_the_replica_answers() -> None:
    async def slow(replica: str, media: list[Media], timeout_seconds: float) -> list[Answer]:
        while fleet.asked < 3:
            await asyncio.sleep(0.01)
        return await well(replica, media, timeout_seconds)

    fleet = MemoryFleet("a", slow)

    async def test() -> Dispatcher:
        router, _ = dispatcher(fleet, stall_seconds=STALL_SECONDS)
        assert right([item(0)], await collect(router, [item(0)], PATIENT_SECONDS))
        assert len(fleet.calls) == 1
        return router

    settled(test())


def test_a_replica_that_says_it_is_ill_has_lost_its_calls() -> None:
    async def ill(replica: str) -> None:
        raise Unavailable("the engine is stuck")

    async def test() -> None:
        liveness = Liveness(ill, at_once, STALL_SECONDS)
        with pytest.raises(ShardLost):
            async with liveness.guard("a"):
                await asyncio.Event().wait()
        await asyncio.sleep(0)
        assert not liveness.silent

    asyncio.run(test())


async def test_a_call_to_a_silent_replica_is_lost_too() -> None:
    liveness = Liveness(never, at_once, STALL_SECONDS)
    for _ in range(2):
        with pytest.raises(ShardLost):
            async with liveness.guard("a"):
                await asyncio.Event().wait()
        assert liveness.silent == {"a"}


async def test_what_the_call_raises_is_its_own() -> None:
    liveness = Liveness(at_once, at_once, STALL_SECONDS)
    with pytest.raises(KeyError):
        async with liveness.guard("a"):
            raise KeyError


async def no_route(replica: str) -> None:
    raise OSError("no route to host")


@pytest.mark.parametrize("cut_off", [never, no_route])
def test_a_replica_whose_node_is_cut_off_is_lost_long_before_it_stalls(
    cut_off: Callable[[str], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness_module, "PROBE_SECONDS", 0.01)
    monkeypatch.setattr(liveness_module, "REACH_SECONDS", 0.05)

    async def test() -> None:
        liveness = Liveness(never, cut_off, PATIENT_SECONDS)
        with pytest.raises(ShardLost):
            async with asyncio.timeout(5), liveness.guard("a"):
                await asyncio.Event().wait()
        assert liveness.silent == {"a"}, "it gets nothing until it answers"

    asyncio.run(test())


def test_a_replica_that_answers_a_call_meanwhile_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(liveness_module, "PROBE_SECONDS", 0.01)
    monkeypatch.setattr(liveness_module, "REACH_SECONDS", 0.05)

    async def test() -> None:
        liveness = Liveness(never, never, PATIENT_SECONDS)

        async def other() -> None:
            for _ in range(20):
                async with liveness.guard("a"):
                    await asyncio.sleep(0.01)

        async with liveness.guard("a"):
            await other()
        assert not liveness.silent

    asyncio.run(test())
