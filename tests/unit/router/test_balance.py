"""Which replica takes which item."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, product
from random import Random
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.options import Policy
from router.policy.balance import (
    POLICIES,
    ReplicaGroup,
    Shards,
    largest_first,
    power_of_two,
    round_robin,
)
from router.policy.fair_queue import FairQueue

costs = st.lists(st.integers(1, 70_000), max_size=30)
loads = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=3), st.integers(0, 200_000), min_size=1, max_size=8
)


def test_the_published_example() -> None:
    shards = largest_first([ReplicaGroup([1000, 100, 200, 50], {"a": 0, "b": 0})])
    assert shards == {"a": [0], "b": [2, 1, 3]}


def test_ties_go_to_the_earlier_replica_and_the_earlier_item() -> None:
    shards = largest_first([ReplicaGroup([7, 7, 7], {"b": 0, "a": 0})])
    assert list(shards.items()) == [("b", [0, 2]), ("a", [1])]


def test_load_that_is_there_counts() -> None:
    assert largest_first([ReplicaGroup([10, 10], {"a": 25, "b": 0})]) == {"b": [0, 1]}


def test_round_robin_keeps_its_turn() -> None:
    plan = round_robin()
    replicas = [next(iter(plan([ReplicaGroup([1], {"a": 9, "b": 0, "c": 0})]))) for _ in range(4)]
    assert replicas == ["a", "b", "c", "a"]


def test_power_of_two_is_repeatable_and_avoids_the_most_loaded() -> None:
    groups = [ReplicaGroup([1] * 50, {"a": 10**9, "b": 0, "c": 0})]
    first = power_of_two(Random(1))(groups)
    assert first == power_of_two(Random(1))(groups)
    assert "a" not in first


@pytest.mark.parametrize("policy", get_args(Policy))
def test_every_policy_is_there_and_wants_a_replica(policy: Policy) -> None:
    with pytest.raises(ValueError, match="no replica"):
        POLICIES[policy](Random(0))([ReplicaGroup([1], {})])


def test_an_item_goes_where_it_is_done_first() -> None:
    fast, slow = ReplicaGroup([10, 2], {"fast": 25}), ReplicaGroup([40, 8], {"slow": 0})
    assert largest_first([fast, slow]) == {"fast": [0], "slow": [1]}
    assert largest_first([slow, fast]) == {"slow": [1], "fast": [0]}


@st.composite
def fleets(draw: st.DrawFn) -> list[ReplicaGroup]:
    """Some groups of replicas, each with a speed of its own, and loads."""
    sizes = draw(costs)
    groups = []
    for number in range(draw(st.integers(1, 3))):
        slower = draw(st.floats(1, 8))
        loaded = {f"{name}{number}": load for name, load in draw(loads).items()}
        groups.append(ReplicaGroup([slower * size for size in sizes], loaded))
    return groups


@given(policy=st.sampled_from(get_args(Policy)), groups=fleets(), seed=st.integers())
def test_every_item_is_in_one_shard(policy: Policy, groups: list[ReplicaGroup], seed: int) -> None:
    shards = POLICIES[policy](Random(seed))(groups)
    items = sorted(item for items in shards.values() for item in items)
    assert items == list(range(len(groups[0].costs)))
    assert list(shards) == [one for group in groups for one in group.loads if shards.get(one)]


@given(costs=costs, loads=loads)
def test_equal_replicas_are_balanced_by_load_alone(costs: list[int], loads: dict[str, int]) -> None:
    load, expected = dict(loads), Shards()
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        replica = min(load, key=lambda replica: load[replica])
        load[replica] += costs[item]
        expected.setdefault(replica, []).append(item)
    assert largest_first([ReplicaGroup(costs, loads)]) == expected


@given(costs=st.lists(st.integers(1, 1000), min_size=1, max_size=7), replicas=st.integers(1, 3))
def test_largest_first_is_within_a_third_of_the_best(costs: list[int], replicas: int) -> None:
    group = ReplicaGroup(costs, {str(replica): 0 for replica in range(replicas)})
    assert longest(largest_first([group]), [group]) * 3 <= best(costs, [1] * replicas) * 4


@given(
    costs=st.lists(st.integers(1, 1000), min_size=1, max_size=6),
    slower=st.lists(st.integers(1, 8), min_size=2, max_size=3),
)
def test_on_unequal_replicas_it_is_within_twice_the_best(
    costs: list[int], slower: list[int]
) -> None:
    """Gonzalez, Ibarra and Sahni, 1977."""
    groups = [ReplicaGroup([k * cost for cost in costs], {str(n): 0}) for n, k in enumerate(slower)]
    assert longest(largest_first(groups), groups) <= 2 * best(costs, slower)


@given(
    slower=st.integers(1, 8),
    fast=st.integers(1, 4),
    slow=st.integers(1, 4),
    costs=st.lists(st.integers(1, 100), min_size=50, max_size=200),
)
def test_a_slower_replica_gets_so_much_less(
    slower: int, fast: int, slow: int, costs: list[int]
) -> None:
    """All are done within one item of each other, so what they get is as their speeds."""
    groups = [
        ReplicaGroup(costs, {f"fast{n}": 0 for n in range(fast)}),
        ReplicaGroup([slower * cost for cost in costs], {f"slow{n}": 0 for n in range(slow)}),
    ]
    seconds = taken(largest_first(groups), groups)
    assert max(seconds.values()) - min(seconds.values()) <= slower * max(costs)


def taken(shards: Shards, groups: Sequence[ReplicaGroup]) -> dict[str, float]:
    """What the shard of each replica costs there."""
    return {
        replica: sum(group.costs[item] for item in shards.get(replica, []))
        for group in groups
        for replica in group.loads
    }


def longest(shards: Shards, groups: Sequence[ReplicaGroup]) -> float:
    return max(taken(shards, groups).values())


def best(costs: Sequence[int], slower: Sequence[int]) -> int:
    """The shortest longest shard, by trying everything. `slower`: of each replica."""
    return min(
        max(
            k * sum(cost for cost, there in zip(costs, choice, strict=True) if there == replica)
            for replica, k in enumerate(slower)
        )
        for choice in product(range(len(slower)), repeat=len(costs))
    )


def test_small_requests_pass_large_ones_and_equal_ones_keep_their_order() -> None:
    queue = FairQueue[str]()
    for number in range(3):
        queue.add(f"large {number}", 64)
    assert queue.pop() == "large 0"
    queue.add("small", 1)
    queue.add("large 3", 64)
    queue.add("medium", 10)
    queue.remove("large 2")
    order = [queue.pop() for _ in range(len(queue))]
    assert order == ["small", "medium", "large 1", "large 3"]


@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=20),
    st.lists(st.integers(1, 5), min_size=1, max_size=5),
)
def test_a_large_request_waits_no_longer_than_its_share(
    waiting: list[int], coming: list[int]
) -> None:
    """Small ones come for ever: as many as are sent. It is one of at most so many that share."""
    queue = FairQueue[tuple[str, int]]()
    for size in [*waiting, 1000]:
        queue.add(("waits", size), size)
    sent = 0
    small = cycle(coming)
    while (request := queue.pop()) != ("waits", 1000):
        sent += request[1]
        size = next(small)
        queue.add(("small", size), size)
    assert sent <= (len(waiting) + 2) * 1000
