"""Items go to the replica whose cache holds them, as long as that is not the busy one."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from actors.types import Answer, Embedding, Media
from router.dispatch import Dispatcher
from router.metrics import RouterMetrics
from router.options import RouterOptions
from router.policy.balance import (
    PATIENCE,
    POLICIES,
    CacheAffinity,
    ReplicaGroup,
    largest_first,
    plan_around,
)
from tests.unit.fleet import MemoryFleet, collect, embedding, item

ENTRY_BYTES = 32
"""Of the fleet's embeddings: one row of 16 bfloat16."""
IDLE = {"a": 0, "b": 0}


def place(affinity: CacheAffinity, media: list[Media], loads: dict[str, int]) -> dict[int, str]:
    return affinity.place(media, [ReplicaGroup([one.plan.patches for one in media], loads)])


def test_an_item_goes_where_it_was_last_seen() -> None:
    affinity = CacheAffinity(10 * ENTRY_BYTES)
    for number, replica in ((1, "a"), (2, "b"), (1, "b")):
        affinity.saw(item(number), embedding(item(number), replica))
    assert place(affinity, [item(1), item(3), item(2)], IDLE) == {0: "b", 2: "b"}
    assert place(affinity, [item(1)], {"a": 0}) == {}  # its holder is excluded
    affinity.keep({"a": 0})
    assert (place(affinity, [item(1)], IDLE), affinity._replica) == ({}, {})


def test_a_holder_with_much_more_to_do_is_left_alone() -> None:
    affinity = CacheAffinity(ENTRY_BYTES)
    affinity.saw(item(1, 100), embedding(item(1), "b"))
    assert place(affinity, [item(1, 100)], {"a": 50, "b": 50 + PATIENCE * 100}) == {0: "b"}
    assert place(affinity, [item(1, 100)], {"a": 50, "b": 51 + PATIENCE * 100}) == {}


@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from("abc"), st.integers(1, 5))),
    st.integers(0, 10 * ENTRY_BYTES),
)
def test_a_replica_is_believed_to_hold_what_fits(
    answers: list[tuple[int, str, int]], max_bytes: int
) -> None:
    affinity = CacheAffinity(max_bytes)
    sizes: dict[int, int] = {}
    for number, replica, rows in answers:
        one = replace(embedding(item(number), replica), shape=(rows, 16))
        affinity.saw(item(number), one)
        if rows * ENTRY_BYTES <= max_bytes:
            sizes[number] = rows * ENTRY_BYTES
            assert place(affinity, [item(number)], dict.fromkeys("abc", 0)) == {0: replica}
        held = place(affinity, [item(n) for n in range(10)], dict.fromkeys("abc", 0))
        for name in "abc":
            assert sum(sizes[n] for n, where in held.items() if where == name) <= max_bytes


def test_the_rest_is_planned_around_what_is_there() -> None:
    shards = plan_around(largest_first, [ReplicaGroup([1000, 100, 200, 50], IDLE)], {0: "b"})
    assert shards == {"a": [2], "b": [0, 1, 3]}


async def hit_rate(*, affinity: bool) -> float:
    """Of popular items over four replicas that each hold an eighth of them."""
    items, held = 400, 50
    caches: dict[str, OrderedDict[str, None]] = {name: OrderedDict() for name in "abcd"}
    sources: list[str] = []

    async def cached(replica: str, media: list[Media], timeout_seconds: float) -> list[Answer]:
        await asyncio.sleep(0)
        answers: list[Answer] = []
        for one in media:
            cache, found = caches[replica], embedding(one, replica)
            if one.digest in cache:
                found = replace(found, source="cache")
            cache[one.digest] = None
            cache.move_to_end(one.digest)
            if len(cache) > held:
                cache.popitem(last=False)
            answers.append(found)
        return answers

    options = RouterOptions(cache_affinity=affinity)
    plan = POLICIES[options.policy](Random(0))
    fleet = MemoryFleet("abcd", cached)
    router = Dispatcher(fleet, options, plan, RouterMetrics(), held * ENTRY_BYTES)
    random = Random(1)
    weights = [1 / (rank + 1) for rank in range(items)]
    for _ in range(600):
        numbers = random.choices(range(items), weights, k=4)
        answers = await collect(router, [item(n, 100 + n) for n in numbers])
        sources += [a.source for a in answers if isinstance(a, Embedding)]
    return sources[800:].count("cache") / len(sources[800:])


def test_more_is_found_with_affinity() -> None:
    without = asyncio.run(hit_rate(affinity=False))
    with_it = asyncio.run(hit_rate(affinity=True))
    print(f"hit rate {without:.2f} without affinity, {with_it:.2f} with it")
    assert with_it > without + 0.1
