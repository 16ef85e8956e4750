"""Identical items in flight: encoded once, and whose fault is whose."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from actors.errors import DeadlineExceeded
from actors.types import Answer, Embedding, Media
from router.dispatch import Dispatcher
from router.replicas.fleet import ShardLost
from tests.unit.fleet import MemoryFleet, collect, dispatcher, item, right, settled, well


class Gate:
    """A replica that answers when it is opened."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def __call__(
        self, replica: str, media: list[Media], timeout_seconds: float
    ) -> list[Answer]:
        try:
            async with asyncio.timeout(timeout_seconds):
                await self.open.wait()
        except TimeoutError:
            return [DeadlineExceeded("late") for _ in media]
        return await well(replica, media, timeout_seconds)


async def steps() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_rows_that_may_stay_on_the_device_are_not_for_those_who_cannot_read_them() -> None:
    fleet = MemoryFleet("a", well)
    router, _ = dispatcher(fleet)
    media = [item(1), replace(item(1), on_device=True), item(1)]
    assert right(media, await collect(router, media))
    assert [len(call[1]) for call in fleet.calls] == [2]


def test_one_call_serves_all_who_ask_while_it_lasts() -> None:
    async def test() -> Dispatcher:
        gate = Gate()
        fleet = MemoryFleet("a", gate)
        router, metrics = dispatcher(fleet, max_outstanding_patches=200)
        media = [item(1), item(2), item(1)]
        requests = [asyncio.create_task(collect(router, media)) for _ in range(4)]
        await steps()
        assert router.ledger.outstanding.patches == 200, "followers cost nothing"
        gate.open.set()
        assert all(right(media, answers) for answers in await asyncio.gather(*requests))
        assert len(fleet.calls) == 1
        assert metrics.registry.get_sample_value("encoder_router_coalesced_total") == 10
        await collect(router, media)
        assert len(fleet.calls) == 2, "nothing is kept once it is answered"
        return router

    settled(test())


def test_items_to_be_kept_are_not_shared() -> None:
    async def test() -> Dispatcher:
        gate = Gate()
        fleet = MemoryFleet("a", gate)
        router, metrics = dispatcher(fleet)

        async def ids(keep: bool) -> list[str]:
            answers = router.answers([item(1), item(1)], "float32", 5, keep=keep)
            return [a.reference async for _, a in answers if isinstance(a, Embedding)]

        callers = []
        for keep in (True, False, True):
            callers.append(asyncio.create_task(ids(keep)))
            await steps()
        gate.open.set()
        first, unkept, second = await asyncio.gather(*callers)
        assert len({*first, *second}) == 4, "an id is one place's alone"
        assert unkept == ["", ""]
        assert [len(digests) for _, digests in fleet.calls] == [2, 1, 2]
        assert metrics.registry.get_sample_value("encoder_router_coalesced_total") == 1
        return router

    settled(test())


def test_other_dtypes_are_other_items() -> None:
    async def test() -> Dispatcher:
        fleet = MemoryFleet("a", well)
        router, _ = dispatcher(fleet)

        async def as_float() -> list[Answer]:
            return [answer async for _, answer in router.answers([item(1)], "float32", 5)]

        await asyncio.gather(collect(router, [item(1)]), as_float())
        assert len(fleet.calls) == 2
        return router

    settled(test())


def test_nothing_is_shared_when_switched_off() -> None:
    async def test() -> Dispatcher:
        fleet = MemoryFleet("a", well)
        router, _ = dispatcher(fleet, coalesce=False)
        media = [item(1), item(1)]
        assert right(media, await collect(router, media))
        assert len(fleet.calls[0][1]) == 2
        return router

    settled(test())


def test_the_first_caller_may_go() -> None:
    async def test() -> Dispatcher:
        gate = Gate()
        fleet = MemoryFleet("a", gate)
        router, _ = dispatcher(fleet)
        first = asyncio.create_task(collect(router, [item(1), item(2)]))
        await steps()
        second = asyncio.create_task(collect(router, [item(1)]))
        await steps()
        first.cancel()
        await steps()
        gate.open.set()
        assert right([item(1)], await second)
        assert fleet.cancelled == 0
        return router

    settled(test())


def test_the_work_ends_with_the_last_caller() -> None:
    async def test() -> Dispatcher:
        fleet = MemoryFleet("a", Gate())
        router, _ = dispatcher(fleet)
        requests = [asyncio.create_task(collect(router, [item(1)])) for _ in range(2)]
        await steps()
        requests[0].cancel()
        await steps()
        assert fleet.cancelled == 0
        requests[1].cancel()
        await steps()
        assert fleet.cancelled == 1
        return router

    settled(test())


def test_a_later_deadline_outlives_the_first_callers() -> None:
    async def test() -> Dispatcher:
        gate = Gate()
        fleet = MemoryFleet("ab", gate)
        router, _ = dispatcher(fleet)
        hasty = asyncio.create_task(collect(router, [item(1)], timeout_seconds=0.05))
        await steps()
        patient = asyncio.create_task(collect(router, [item(1)], timeout_seconds=5))
        [answer] = await hasty
        assert isinstance(answer, DeadlineExceeded)
        await asyncio.sleep(0.02)
        gate.open.set()
        assert right([item(1)], await patient)
        assert len(fleet.calls) == 2
        return router

    settled(test())


def test_the_impatience_of_others_does_not_count_as_attempts() -> None:
    async def hasty(router: Dispatcher, start_seconds: float) -> Answer:
        await asyncio.sleep(start_seconds)
        [answer] = await collect(router, [item(1)], timeout_seconds=0.03)
        return answer

    async def test() -> Dispatcher:
        gate = Gate()
        fleet = MemoryFleet("a", gate)
        router, _ = dispatcher(fleet, max_attempts=2)
        others = [asyncio.create_task(hasty(router, n * 0.02)) for n in range(5)]
        await asyncio.sleep(0.1)
        patient = asyncio.create_task(collect(router, [item(1)]))
        assert all(isinstance(a, DeadlineExceeded) for a in await asyncio.gather(*others))
        assert len(fleet.calls) > 2
        gate.open.set()
        assert right([item(1)], await patient)
        return router

    settled(test())


def test_what_nobody_wants_any_more_is_not_planned_again() -> None:
    async def test() -> Dispatcher:
        gate = asyncio.Event()

        async def lose_a(replica: str, media: list[Media], timeout_seconds: float) -> list[Answer]:
            await gate.wait()
            if replica == "a":
                raise ShardLost("killed")
            return await well(replica, media, timeout_seconds)

        fleet = MemoryFleet("a", lose_a)
        router, _ = dispatcher(fleet)
        both = asyncio.create_task(collect(router, [item(1), item(2)]))
        await steps()
        one = asyncio.create_task(collect(router, [item(1)]))
        await steps()
        both.cancel()
        fleet.replicas = ["a", "b"]
        await steps()
        gate.set()
        assert right([item(1)], await one)
        assert fleet.calls[1:] == [("b", [item(1).digest])]
        return router

    settled(test())
