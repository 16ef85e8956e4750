"""Shards that are lost, replicas that fail, callers that go: what becomes of items."""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextlib import suppress
from dataclasses import replace
from random import Random
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.errors import (
    ConfigError,
    DeadlineExceeded,
    EncodeFailed,
    InvalidMedia,
    Overloaded,
    ServiceError,
    TooLarge,
    Unavailable,
)
from actors.types import Answer, Embedding, ItemPlan, Media, Work
from router import dispatch as dispatch_module
from router.dispatch import Dispatcher
from router.options import RouterOptions
from router.policy.ledger import UNMEASURED_ITEMS
from router.replicas.fleet import ReplicaDied, ReplicaUnreachable, ShardLost
from router.router import Router
from tests.unit.fleet import MemoryFleet, collect, dispatcher, embedding, item, right, settled, well


def test_only_the_items_of_a_lost_shard_are_planned_again_and_elsewhere() -> None:
    async def a_is_gone(replica: str, media: list[Media], timeout_seconds: float) -> list[Answer]:
        if replica == "a":
            raise ShardLost("killed")
        return await well(replica, media, timeout_seconds)

    async def test() -> Dispatcher:
        fleet = MemoryFleet("abc", a_is_gone)
        router, metrics = dispatcher(fleet)
        media = [item(0, 600), item(1, 300), item(2, 200), item(3, 104)]
        assert right(media, await collect(router, media))
        digests = [one.digest for one in media]
        assert fleet.calls == [
            ("a", digests[:1]),
            ("b", digests[1:2]),
            ("c", digests[2:]),
            ("b", digests[:1]),
        ]
        assert metrics.registry.get_sample_value("encoder_router_replans_total") == 1
        assert right(media, await collect(router, media))
        assert "a" not in {replica for replica, _ in fleet.calls[4:]}
        return router

    settled(test())


def test_slower_replicas_get_less_as_soon_as_all_have_said_how_fast_they_are() -> None:
    async def test() -> Dispatcher:
        fleet = MemoryFleet("ab", well)
        router, _ = dispatcher(fleet)
        fast = {"launch_seconds": 0.0, "patch_seconds": 1e-6, "attention_seconds": 0.0}
        fleet.metadata["a"] = {"device": "fast", "cost": fast}
        media = [item(number) for number in range(10)]
        assert right(media, await collect(router, media))
        assert [len(items) for _, items in fleet.calls] == [5, 5]
        slow = {"launch_seconds": 0.0, "patch_seconds": 4e-6, "attention_seconds": 0.0}
        fleet.metadata["b"] = {"device": "slow", "cost": slow}
        assert right(media, await collect(router, media))
        assert [(replica, len(items)) for replica, items in fleet.calls[2:]] == [("a", 8), ("b", 2)]
        return router

    settled(test())


def video(number: int) -> Media:
    """Of 4 groups of frames with 25 tokens each."""
    plan = ItemPlan((4, 2, 50), 400, 100, (100,), frames=4)
    return replace(item(number), kind="video", plan=plan)


def test_items_go_to_pools_that_take_them() -> None:
    async def test() -> Dispatcher:
        fleet = MemoryFleet("abc", well)
        fleet.metadata["a"] = {"largest_item": [25]}
        router, _ = dispatcher(fleet)
        large = [item(number, 104) for number in range(4)]  # 26 tokens
        small = [item(4), video(5), item(6), item(7)]
        assert right(small + large, await collect(router, small + large))
        got = {replica: set[str]() for replica in "abc"}
        for replica, digests in fleet.calls:
            got[replica].update(digests)
        assert got["a"]
        assert got["a"] <= {one.digest for one in small}
        assert got["b"]
        assert got["c"]
        fleet.replicas = ["a"]
        *answers, last = await collect(router, [*small, large[0]])
        assert right(small, answers)
        assert isinstance(last, Unavailable)
        assert "26 tokens and the encoders that are ready take 25: try again" in last.message
        return router

    settled(test())


def test_items_of_a_lost_pool_are_unavailable_at_once() -> None:
    """Waiting, they would take the room of items that other pools take."""

    async def test() -> Dispatcher:
        fleet = MemoryFleet("ab", well)
        fleet.metadata["a"] = {"largest_item": [25]}
        router, _ = dispatcher(fleet)
        assert right([item(0)], await collect(router, [item(0)]))
        fleet.replicas = ["a"]
        begun = asyncio.get_running_loop().time()
        small, large = await collect(router, [item(1), item(2, 104)])
        assert right([item(1)], [small])
        assert isinstance(large, Unavailable)
        assert asyncio.get_running_loop().time() - begun < 0.1
        return router

    settled(test())


@pytest.mark.parametrize("in_time", [True, False])
def test_items_that_are_lost_with_the_last_replica_wait_for_another(in_time: bool) -> None:
    async def test() -> Dispatcher:
        async def all_die(replica: str, media: list[Media], seconds: float) -> list[Answer]:
            if fleet.replicas == ["b"]:
                return await well(replica, media, seconds)
            fleet.replicas = []
            raise ShardLost("killed")

        fleet = MemoryFleet("a", all_die)
        router, _ = dispatcher(fleet, replica_wait_seconds=0.3)
        media = [item(0), item(1)]
        begun = asyncio.get_running_loop().time()
        request = asyncio.create_task(collect(router, media))
        await asyncio.sleep(0.1)
        if in_time:
            fleet.replicas = ["b"]
            assert right(media, await request)
        else:
            answers = await request
            assert [type(answer) for answer in answers] == [Unavailable] * 2
            assert 0.2 < asyncio.get_running_loop().time() - begun < 1
        assert [replica for replica, _ in fleet.calls] == ["a", "b"][: 1 + in_time]
        return router

    settled(test())


def test_a_large_item_is_retried_where_it_is_taken() -> None:
    async def test() -> Dispatcher:
        failures = [ShardLost("not reached")]

        async def once(replica: str, media: list[Media], timeout_seconds: float) -> list[Answer]:
            if failures:
                raise failures.pop()
            return await well(replica, media, timeout_seconds)

        fleet = MemoryFleet("ab", once)
        fleet.metadata["a"] = {"largest_item": [25]}
        router, _ = dispatcher(fleet)
        assert right([item(0, 104)], await collect(router, [item(0, 104)]))
        assert right([item(1)], await collect(router, [item(1)]))
        assert [replica for replica, _ in fleet.calls] == ["b", "b", "a"]
        return router

    settled(test())


def test_attempts_are_bounded() -> None:
    async def lost(replica: str, media: list[Media], timeout_seconds: float) -> list[Answer]:
        raise ShardLost("killed")

    async def test() -> Dispatcher:
        fleet = MemoryFleet("abcdef", lost)
        router, _ = dispatcher(fleet, max_attempts=3)
        [answer] = await collect(router, [item(0)])
        assert isinstance(answer, Unavailable)
        assert "3 attempts" in answer.message
        assert [replica for replica, _ in fleet.calls] == ["a", "b", "c"]
        return router

    settled(test())


def test_the_only_replica_is_tried_again() -> None:
    async def test() -> Dispatcher:
        failures = iter([ShardLost("not reached")])

        async def once(replica: str, media: list[Media], timeout_seconds: float) -> list[Answer]:
            for failure in failures:
                raise failure
            return await well(replica, media, timeout_seconds)

        router, _ = dispatcher(MemoryFleet("a", once))
        assert right([item(0)], await collect(router, [item(0)]))
        return router

    settled(test())


def test_without_a_replica_the_request_is_refused_after_a_while() -> None:
    async def test() -> Dispatcher:
        router, _ = dispatcher(MemoryFleet([], well))
        with pytest.raises(Unavailable, match="no encoder replica"):
            await collect(router, [item(0)])
        return router

    settled(test())


def test_a_full_router_says_so_before_it_is_given_anything() -> None:
    async def held(replica: str, media: list[Media], timeout_seconds: float) -> list[Answer]:
        await done.wait()
        return await well(replica, media, timeout_seconds)

    done = asyncio.Event()

    async def test() -> Dispatcher:
        fleet = MemoryFleet(["a"], held)
        router, metrics = dispatcher(fleet, max_outstanding_patches=200)
        router.check_room()
        request = asyncio.create_task(collect(router, [item(0), item(1)]))
        await asyncio.sleep(0.01)
        with pytest.raises(Overloaded, match="200 of 200 patches"):
            router.check_room()
        with pytest.raises(Overloaded):
            await collect(router, [item(2)])
        assert metrics.registry.get_sample_value("encoder_router_rejections_total") == 2
        fleet.replicas = []
        router.check_room()  # they may be on their way: what comes waits for them
        done.set()
        assert right([item(0), item(1)], await request)
        router.check_room()
        return router

    settled(test())


def test_a_replica_that_comes_in_time_is_waited_for() -> None:
    async def test() -> Dispatcher:
        fleet = MemoryFleet([], well)
        router, _ = dispatcher(fleet, replica_wait_seconds=5)
        request = asyncio.create_task(collect(router, [item(0)]))
        await asyncio.sleep(0.03)
        fleet.replicas = ["a"]
        assert right([item(0)], await request)
        return router

    settled(test())


def test_an_error_for_all_is_an_answer_for_each() -> None:
    async def refuse(replica: str, media: list[Media], timeout_seconds: float) -> list[Answer]:
        raise InvalidMedia("no")

    async def crash(replica: str, media: list[Media], timeout_seconds: float) -> list[Answer]:
        raise RuntimeError("boom")

    async def forget(replica: str, media: list[Media], timeout_seconds: float) -> list[Answer]:
        return []

    async def test(fleet: MemoryFleet, kind: type[Exception]) -> Dispatcher:
        router, _ = dispatcher(fleet)
        answers = await collect(router, [item(0), item(1), item(2)])
        assert [type(answer) for answer in answers] == [kind] * 3
        return router

    settled(test(MemoryFleet("ab", refuse), InvalidMedia))
    settled(test(MemoryFleet("ab", crash), EncodeFailed))
    settled(test(MemoryFleet("ab", forget), EncodeFailed))


def test_the_deadline_holds_even_if_a_replica_hangs() -> None:
    async def b_hangs(replica: str, media: list[Media], timeout_seconds: float) -> list[Answer]:
        if replica == "b":
            await asyncio.Event().wait()
        return await well(replica, media, timeout_seconds)

    async def test() -> Dispatcher:
        fleet = MemoryFleet("ab", b_hangs)
        router, _ = dispatcher(fleet)
        quick, late = await collect(router, [item(0, 200), item(1)], timeout_seconds=1)
        assert right([item(0)], [quick])
        assert isinstance(late, DeadlineExceeded)
        await asyncio.sleep(0)
        assert fleet.cancelled == 1
        return router

    settled(test())


def test_embeddings_are_let_go_of_with_their_last_reader() -> None:
    async def test() -> Dispatcher:
        router, _ = dispatcher(MemoryFleet("ab", well))
        answers = await collect(router, [item(0), item(1), item(2)])
        data = [weakref.ref(answer.data) for answer in answers if isinstance(answer, Embedding)]
        del answers
        await asyncio.sleep(0)
        assert len(data) == 3
        assert all(reference() is None for reference in data)
        return router

    gc.disable()  # they are large: waiting for the collector would fill the object store
    try:
        settled(test())
    finally:
        gc.enable()


callers = st.lists(
    st.tuples(
        st.lists(st.integers(0, 5), max_size=5),
        st.sampled_from([0.0, 0.001, 5.0]),
        st.sampled_from([None, None, 0, 1, 3]),
    ),
    max_size=6,
)


@settings(deadline=None, max_examples=60)
@given(callers=callers, seed=st.integers(0, 10**6), coalesce=st.booleans())
def test_whatever_happens_nothing_is_left(
    callers: list[tuple[list[int], float, int | None]], seed: int, coalesce: bool
) -> None:
    async def test() -> Dispatcher:
        random = Random(seed)

        async def any_fate(
            replica: str, media: list[Media], timeout_seconds: float
        ) -> list[Answer]:
            for _ in range(random.randrange(4)):
                await asyncio.sleep(0)
            match random.randrange(10):
                case 0 | 1:
                    raise ShardLost("killed")
                case 2:
                    raise RuntimeError("boom")
                case 3:
                    fleet.replicas = random.sample("abc", random.randrange(4))
                case 4:
                    return [DeadlineExceeded("late") for _ in media]
                case 5:
                    return [random.choice([embedding(m, replica), broken]) for m in media]
                case 6:
                    raise random.choice([ReplicaDied("killed"), ReplicaUnreachable("refused")])
                case 7:
                    fleet.hung.add(replica)
                    try:
                        await asyncio.Event().wait()
                    finally:
                        fleet.hung.discard(replica)
            return [embedding(one, replica) for one in media]

        async def caller(numbers: list[int], timeout_seconds: float) -> None:
            media = [item(number) for number in numbers]
            with suppress(Overloaded, Unavailable):
                answers = await collect(router, media, timeout_seconds)
                for one, answer in zip(media, answers, strict=True):
                    assert isinstance(answer, ServiceError) or right([one], [answer])

        broken: Answer = Unavailable("broken")
        fleet = MemoryFleet("abc", any_fate)
        router, _ = dispatcher(
            fleet,
            coalesce=coalesce,
            exclude_seconds=0,
            replica_wait_seconds=0.005,
            stall_seconds=0.02,
            max_outstanding_patches=1000,
        )
        tasks = []
        for numbers, timeout_seconds, patience in callers:
            tasks.append(asyncio.create_task(caller(numbers, timeout_seconds)))
            if patience is not None:
                for _ in range(patience):
                    await asyncio.sleep(0)
                tasks[-1].cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert outcome is None or isinstance(outcome, asyncio.CancelledError), outcome
        return router

    settled(test())


def test_one_request_after_another_goes_round_the_idle_replicas_of_the_node() -> None:
    async def test() -> Dispatcher:
        fleet = MemoryFleet(["far", "near a", "near b"], well)
        fleet.near = lambda: ["near a", "near b"]  # type: ignore[method-assign]
        router, _ = dispatcher(fleet)
        for number in range(4):
            await collect(router, [item(number)])
        assert [replica for replica, _ in fleet.calls] == ["near a", "near b"] * 2
        await collect(router, [item(10), item(11), item(12)])
        assert {replica for replica, _ in fleet.calls[4:]} == set(fleet.replicas)
        return router

    settled(test())


class Busy:
    """Replicas that encode one call after another, when they are told to, if `held`."""

    def __init__(self, replicas: str, *, held: bool = False) -> None:
        self.fleet = MemoryFleet(replicas, self.encode)
        self.devices = {replica: asyncio.Lock() for replica in replicas}
        self.go = asyncio.Event()
        if not held:
            self.go.set()
        self.encoded = 0

    async def encode(
        self, replica: str, media: list[Media], timeout_seconds: float
    ) -> list[Answer]:
        async with self.devices[replica]:
            await self.go.wait()
            self.encoded += len(media)
            return await well(replica, media, timeout_seconds)


async def stream(router: Dispatcher, first: int, items: int = 64) -> int:
    """How many answers a stream gave, of items from this number on."""
    media = [item(first + number) for number in range(items)]
    answers = router.answers(media, "bfloat16", 30, early=True)
    return len([answer async for answer in answers])


@pytest.mark.parametrize("early", [True, False])
def test_a_small_request_waits_for_what_was_sent_not_for_what_waits(early: bool) -> None:
    async def test() -> Dispatcher:
        busy = Busy("abc", held=True)
        router, _ = dispatcher(busy.fleet)
        large = [
            stream(router, 1000 * number)
            if early
            else collect(router, [item(1000 * number + one) for one in range(64)])
            for number in range(50)
        ]
        tasks = [asyncio.create_task(one) for one in large]
        await asyncio.sleep(0.01)
        sent = sum(len(digests) for _, digests in busy.fleet.calls)
        assert 3 * UNMEASURED_ITEMS <= sent <= 3 * UNMEASURED_ITEMS + 2 * 64
        assert router.ledger.waiting == 100 * (50 * 64 - sent)
        assert busy.fleet.waiting_per_sent == (50 * 64 - sent) / sent
        small = asyncio.create_task(collect(router, [item(-1)]))
        await asyncio.sleep(0.01)
        busy.go.set()
        assert right([item(-1)], await small)
        assert busy.encoded <= sent + 2 * 64 + 1
        await asyncio.gather(*tasks)
        assert busy.encoded == 50 * 64 + 1
        return router

    settled(test())


async def test_what_a_replica_tells_of_the_items_of_others_counts_at_once() -> None:
    fleet = MemoryFleet(["a", "b"], well)
    router, _ = dispatcher(fleet)
    fleet.heard("a", Work(1000, 10**6))
    await collect(router, [item(number) for number in range(5)])
    fleet.heard("b", Work(1000, 10**6))
    fleet.heard("a", Work(0))
    await collect(router, [item(number) for number in range(5, 10)])
    assert [replica for replica, _ in fleet.calls] == ["b", "a"]


def test_requests_that_wait_for_a_pool_hold_up_no_others() -> None:
    async def test() -> Dispatcher:
        busy = Busy("ab")
        busy.fleet.metadata["a"] = {"largest_item": [25]}
        router, _ = dispatcher(busy.fleet)
        await busy.devices["b"].acquire()
        requests = [[item(100 * n + one, 104) for one in range(UNMEASURED_ITEMS)] for n in range(4)]
        large = [asyncio.create_task(collect(router, media)) for media in requests]
        await asyncio.sleep(0.01)
        assert [replica for replica, _ in busy.fleet.calls] == ["b"], "the others wait"
        for number in range(3):
            small = [item(1000 * number - one) for one in range(1, 65)]
            assert right(small, await collect(router, small))
        # Small items leave the room on the other replica to what waited for it before them.
        assert [replica for replica, _ in busy.fleet.calls] == ["b", "a", "a", "a"]
        busy.devices["b"].release()
        for media, answers in zip(requests, await asyncio.gather(*large), strict=True):
            assert right(media, answers)
        return router

    settled(test())


def test_a_pool_is_told_of_what_waits_for_it_alone() -> None:
    """Or a pool would be scaled up for items that it does not take."""

    async def test() -> Dispatcher:
        busy = Busy("ab", held=True)
        busy.fleet.metadata["a"] = {"largest_item": [25]}
        router, _ = dispatcher(busy.fleet)
        with patch.object(
            router, "_pooled_waiting_per_sent", wraps=router._pooled_waiting_per_sent
        ) as counted:
            large = [asyncio.create_task(collect(router, [item(n, 104)])) for n in range(96)]
            await asyncio.sleep(0.05)
        assert counted.call_count == 1, "it reads the whole queue"
        assert busy.fleet.waiting_per_sent == 2
        small = [
            asyncio.create_task(collect(router, [item(-1 - n)])) for n in range(UNMEASURED_ITEMS)
        ]
        await asyncio.sleep(0.05)
        assert {replica for replica, _ in busy.fleet.calls[UNMEASURED_ITEMS:]} == {"a"}
        assert busy.fleet.waiting_per_sent == 0
        small += [asyncio.create_task(collect(router, [item(-100)]))]
        await asyncio.sleep(0.05)
        for replica, own in (("a", 32 * 100), ("b", 32 * 104)):
            waiting = 100 / (32 * 204) + (64 * 104 / own if replica == "b" else 0)
            assert router._pooled_waiting_per_sent(replica) == pytest.approx(waiting)
        busy.go.set()
        await asyncio.gather(*large, *small)
        return router

    settled(test())


def test_requests_that_wait_for_a_pool_cost_others_little() -> None:
    """Their replicas are not looked for once per request."""

    async def test() -> Dispatcher:
        busy = Busy("ab")
        busy.fleet.metadata["a"] = {"largest_item": [25]}
        router, _ = dispatcher(busy.fleet)
        await busy.devices["b"].acquire()
        large = [asyncio.create_task(collect(router, [item(n, 104)])) for n in range(300)]
        await asyncio.sleep(0.05)
        assert router.ledger.waiting == 104 * (300 - UNMEASURED_ITEMS)
        with patch.object(router, "_sound", wraps=router._sound) as sound:
            await collect(router, [item(-1)])
        assert sound.call_count < 20
        busy.devices["b"].release()
        await asyncio.gather(*large)
        return router

    settled(test())


def test_a_plan_that_fails_leaves_nothing_behind() -> None:
    async def test() -> Dispatcher:
        router, _ = dispatcher(MemoryFleet("a", well))
        broken = patch.object(router, "_plan", side_effect=ZeroDivisionError)
        with broken, pytest.raises(ZeroDivisionError):
            await collect(router, [item(1)])
        return router

    settled(test())


def test_streams_that_nobody_reads_do_not_hold_up_others() -> None:
    async def test() -> Dispatcher:
        router, _ = dispatcher(Busy("abc").fleet)
        streams = [
            router.answers([item(64 * number + one) for one in range(64)], "bfloat16", 30)
            for number in range(20)
        ]
        await asyncio.gather(*(anext(one) for one in streams))
        assert right([item(-1)], await collect(router, [item(-1)]))
        for one in streams:
            await one.aclose()
        return router

    settled(test())


def test_a_waiting_item_is_sent_with_the_first_request_that_needs_it() -> None:
    async def test() -> Dispatcher:
        busy = Busy("a", held=True)
        router, _ = dispatcher(busy.fleet)
        before = asyncio.create_task(stream(router, 0))
        large = asyncio.create_task(stream(router, 1000))
        await asyncio.sleep(0.01)
        small = asyncio.create_task(collect(router, [item(1063)]))
        await asyncio.sleep(0.01)
        busy.go.set()
        await small
        assert busy.encoded < 64 + UNMEASURED_ITEMS
        assert await large == await before == 64
        assert busy.encoded == 128
        return router

    settled(test())


def test_a_request_that_leaves_while_it_waits_leaves_nothing() -> None:
    async def test() -> Dispatcher:
        busy = Busy("a", held=True)
        router, _ = dispatcher(busy.fleet)
        sent, waiting, joined = (
            asyncio.create_task(one)
            for one in (stream(router, 0), stream(router, 1000), stream(router, 1000, 1))
        )
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert router.ledger.waiting == 100, "the item that another request waits for"
        busy.go.set()
        assert (await sent, await joined) == (64, 1)
        assert busy.encoded == 65
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return router

    settled(test())


def test_requests_wait_for_a_replica_when_all_are_lost() -> None:
    async def test() -> Dispatcher:
        dead = asyncio.Event()

        async def until_dead(replica: str, media: list[Media], seconds: float) -> list[Answer]:
            if replica == "b":
                return await well(replica, media, seconds)
            await dead.wait()
            raise ShardLost("killed")

        fleet = MemoryFleet("a", until_dead)
        router, _ = dispatcher(fleet, replica_wait_seconds=5)
        requests = [asyncio.create_task(stream(router, 1000 * number)) for number in range(3)]
        await asyncio.sleep(0.01)
        fleet.replicas = []
        dead.set()
        await asyncio.sleep(0.01)
        fleet.replicas = ["b"]
        assert await asyncio.gather(*requests) == [64] * 3
        return router

    settled(test())


def test_a_replica_that_comes_gets_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though no call ends and no request arrives, as beside long videos."""
    monkeypatch.setattr(dispatch_module, "WATCH_SECONDS", 0.01)

    async def test() -> Dispatcher:
        busy = Busy("ab", held=True)
        busy.fleet.replicas = ["a"]
        router, _ = dispatcher(busy.fleet)
        requests = [asyncio.create_task(stream(router, 1000 * number)) for number in range(3)]
        await asyncio.sleep(0.01)
        assert {replica for replica, _ in busy.fleet.calls} == {"a"}
        busy.fleet.replicas = ["a", "b"]
        await asyncio.sleep(0.05)
        assert {replica for replica, _ in busy.fleet.calls} == {"a", "b"}
        busy.go.set()
        assert await asyncio.gather(*requests) == [64] * 3
        return router

    settled(test())


def test_the_policy_and_limits_of_a_router_change_while_it_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> Dispatcher:
        fleet = MemoryFleet("abc", well)
        dispatch, _ = dispatcher(fleet)
        router = Router.__new__(Router)
        router._dispatcher, router._options = dispatch, RouterOptions(exclude_seconds=60)
        router._running = False
        with pytest.raises(ConfigError, match=r"router\.replicas: not a key"):
            await router.reconfigure({"router": {"replicas": 2}})
        await router.check_health()
        media = [item(number) for number in range(9)]
        for policy, replicas in (("round_robin", 3), ("largest_first", 1)):
            fleet.calls.clear()
            # By load alone the first of idle replicas would get a lone item.
            await router.reconfigure({"router": {"policy": policy, "cache_affinity": False}})
            dispatch.ledger.turn = lambda replica: 0  # type: ignore[method-assign]
            for one in media[:3]:
                assert right([one], await collect(dispatch, [one]))
            assert len({replica for replica, _ in fleet.calls}) == replicas
        await router.reconfigure({"router": {"max_outstanding_patches": 500}})
        with pytest.raises(TooLarge, match="takes 500 at a time"):
            await collect(dispatch, media)
        await router.reconfigure({"router": {"max_outstanding_patches": 0}})
        assert "the options stay as they were: router.max_outstanding_patches: " in caplog.text
        with pytest.raises(TooLarge, match="takes 500 at a time"):
            await collect(dispatch, media)
        await router.reconfigure({})
        assert right(media, await collect(dispatch, media))
        return dispatch

    settled(test())
