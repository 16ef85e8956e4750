"""Replicas that die of an item, break down, are full or nearly late: who pays for it."""

from __future__ import annotations

import asyncio
from collections import Counter

from actors.errors import DeadlineExceeded, EncodeFailed, Unavailable
from actors.types import Answer, Media
from router.dispatch import MARGIN_FRACTION, Dispatcher
from router.replicas.fleet import ReplicaDied, ShardLost
from tests.unit.fleet import MemoryFleet, collect, dispatcher, embedding, item, right, settled, well


def test_an_item_that_kills_is_given_up_after_two_replicas() -> None:
    poison, *others = media = [item(number) for number in range(20)]
    dead: set[str] = set()

    async def dies_of_it(replica: str, media: list[Media], timeout_seconds: float) -> list[Answer]:
        if replica in dead:
            raise ShardLost("gone")
        await asyncio.sleep(0)
        if poison in media:
            dead.add(replica)
            raise ReplicaDied("the process exited")
        return await well(replica, media, timeout_seconds)

    async def test() -> Dispatcher:
        fleet = MemoryFleet("abcd", dies_of_it)
        router, _ = dispatcher(fleet)
        failed, *answers = await collect(router, media)
        assert isinstance(failed, EncodeFailed)
        assert "died twice" in failed.message
        assert right(others, answers)
        sizes = [len(digests) for _, digests in fleet.calls]
        assert sizes == [5] * 4 + [1] * 6
        assert len(dead) == 3, "one with companions, two alone"
        return router

    settled(test())


def test_a_lost_node_is_not_blamed_on_an_item() -> None:
    """Its replicas die at the same time, before anybody knows that the node is lost."""

    async def only_d(replica: str, media: list[Media], timeout_seconds: float) -> list[Answer]:
        if replica != "d":
            raise ReplicaDied("the process exited")
        return await well(replica, media, timeout_seconds)

    async def test() -> Dispatcher:
        fleet = MemoryFleet("abcd", only_d)
        fleet.nodes = {**dict.fromkeys("abc", "lost"), "d": "other"}
        router, _ = dispatcher(fleet)
        for number in range(8):
            assert right([item(number)], await collect(router, [item(number)]))
        assert len(fleet.calls) < 16
        return router

    settled(test())


def test_replicas_that_were_gone_before_they_had_the_item_do_not_speak_against_it() -> None:
    async def only_d(replica: str, media: list[Media], timeout_seconds: float) -> list[Answer]:
        if replica != "d":
            raise ShardLost("gone")
        return await well(replica, media, timeout_seconds)

    async def test() -> Dispatcher:
        router, _ = dispatcher(MemoryFleet("abcd", only_d))
        assert right([item(0)], await collect(router, [item(0)]))
        return router

    settled(test())


def test_a_replica_that_refuses_at_once_attracts_nothing() -> None:
    items: Counter[str] = Counter()

    async def a_is_broken(replica: str, media: list[Media], timeout_seconds: float) -> list[Answer]:
        items[replica] += len(media)
        if replica == "a":
            return [Unavailable("the encoder broke down") for _ in media]
        await asyncio.sleep(0.01)
        return await well(replica, media, timeout_seconds)

    async def test() -> Dispatcher:
        router, _ = dispatcher(MemoryFleet("ab", a_is_broken), exclude_seconds=60)

        async def caller(number: int) -> None:
            for each in range(5):
                media = [item(10 * number + each)]
                assert right(media, await collect(router, media))

        await asyncio.gather(*(caller(number) for number in range(8)))
        assert items["a"] <= 8, "nothing once it is known"
        assert items["b"] == 40
        return router

    settled(test())


def test_those_that_all_refuse_are_given_up() -> None:
    async def refuse(replica: str, media: list[Media], timeout_seconds: float) -> list[Answer]:
        return [Unavailable("stopping") for _ in media]

    async def test() -> Dispatcher:
        fleet = MemoryFleet("abc", refuse)
        router, _ = dispatcher(fleet, max_attempts=3)
        [answer] = await collect(router, [item(0)])
        assert isinstance(answer, Unavailable)
        assert "3 attempts; last replica c: stopping" in answer.message
        return router

    settled(test())


def test_a_late_item_does_not_take_its_companions_with_it() -> None:
    given: list[float] = []

    async def half(replica: str, media: list[Media], timeout_seconds: float) -> list[Answer]:
        given.append(timeout_seconds)
        return [embedding(media[0], replica), DeadlineExceeded("late")]

    async def test() -> Dispatcher:
        router, _ = dispatcher(MemoryFleet("a", half))
        quick, late = await collect(router, [item(0), item(1)], timeout_seconds=0.3)
        assert right([item(0)], [quick])
        assert isinstance(late, DeadlineExceeded)
        assert max(given) <= 0.3 * (1 - MARGIN_FRACTION), "time for the way back"
        return router

    settled(test())


def test_items_of_one_replica_come_early_if_asked() -> None:
    async def by_size(replica: str, media: list[Media], timeout_seconds: float) -> list[Answer]:
        for _ in range(sum(one.plan.patches for one in media) // 100):
            await asyncio.sleep(0)
        return await well(replica, media, timeout_seconds)

    async def test() -> Dispatcher:
        fleet = MemoryFleet("a", by_size)
        router, _ = dispatcher(fleet)
        media = [item(0, 6000), item(1, 200), item(2, 3000), item(1, 200)]
        came = [p async for p, _ in router.answers(media, "bfloat16", 5, early=True)]
        assert came == [1, 3, 2, 0]
        assert [len(digests) for _, digests in fleet.calls] == [3], "one call"
        return router

    settled(test())


def test_what_was_answered_early_is_not_encoded_again() -> None:
    encoded: list[tuple[str, str]] = []

    async def dies(replica: str, media: list[Media], timeout_seconds: float) -> list[Answer]:
        encoded.extend((replica, one.digest) for one in media)
        if replica == "a" and media[0].plan.patches > 200:
            await asyncio.sleep(0.01)
            raise ReplicaDied("gone")
        return await well(replica, media, timeout_seconds)

    async def test() -> Dispatcher:
        fleet = MemoryFleet("a", dies)
        router, _ = dispatcher(fleet)
        media = [item(0, 100), item(1, 600), item(2, 100), item(3, 800)]
        found: dict[int, Answer] = {}
        async for place, answer in router.answers(media, "bfloat16", 5, early=True):
            assert place not in found
            found[place] = answer
            fleet.replicas = ["b"]
        assert right(media, [found[place] for place in range(4)])
        again = sorted(digest for replica, digest in encoded if replica == "b")
        assert again == sorted([media[1].digest, media[3].digest])
        return router

    settled(test())


def test_who_leaves_after_an_early_answer_cancels_the_rest() -> None:
    async def slow(replica: str, media: list[Media], timeout_seconds: float) -> list[Answer]:
        await asyncio.sleep(60 if media[0].plan.patches > 200 else 0)
        return await well(replica, media, timeout_seconds)

    async def test() -> Dispatcher:
        fleet = MemoryFleet("a", slow)
        router, _ = dispatcher(fleet)
        answers = router.answers([item(0, 600), item(1)], "bfloat16", 5, early=True)
        async for place, _ in answers:
            assert place == 1
            break
        await answers.aclose()
        await asyncio.sleep(0.01)
        assert fleet.cancelled == 1
        return router

    settled(test())
