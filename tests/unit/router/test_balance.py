"""Which replica takes which item."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from random import Random
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.options import Policy
from router.policy.balance import POLICIES, largest_first, power_of_two, round_robin

costs = st.lists(st.integers(1, 70_000), max_size=30)
loads = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=3), st.integers(0, 200_000), min_size=1, max_size=8
)


def test_the_published_example() -> None:
    shards = largest_first([1000, 100, 200, 50], {"a": 0, "b": 0})
    assert shards == {"a": [0], "b": [2, 1, 3]}


def test_ties_go_to_the_earlier_replica_and_the_earlier_item() -> None:
    shards = largest_first([7, 7, 7], {"b": 0, "a": 0})
    assert list(shards.items()) == [("b", [0, 2]), ("a", [1])]


def test_load_that_is_there_counts() -> None:
    assert largest_first([10, 10], {"a": 25, "b": 0}) == {"b": [0, 1]}


def test_round_robin_keeps_its_turn() -> None:
    plan = round_robin()
    replicas = [next(iter(plan([1], {"a": 9, "b": 0, "c": 0}))) for _ in range(4)]
    assert replicas == ["a", "b", "c", "a"]


def test_power_of_two_is_repeatable_and_avoids_the_most_loaded() -> None:
    load = {"a": 10**9, "b": 0, "c": 0}
    first = power_of_two(Random(1))([1] * 50, load)
    assert first == power_of_two(Random(1))([1] * 50, load)
    assert "a" not in first


@pytest.mark.parametrize("policy", get_args(Policy))
def test_every_policy_is_there_and_wants_a_replica(policy: Policy) -> None:
    with pytest.raises(ValueError, match="no replica"):
        POLICIES[policy](Random(0))([1], {})


@given(policy=st.sampled_from(get_args(Policy)), costs=costs, loads=loads, seed=st.integers())
def test_every_item_is_in_one_shard(
    policy: Policy, costs: list[int], loads: dict[str, int], seed: int
) -> None:
    shards = POLICIES[policy](Random(seed))(costs, loads)
    assert sorted(item for items in shards.values() for item in items) == list(range(len(costs)))
    assert list(shards) == [replica for replica in loads if shards.get(replica)]


@given(costs=st.lists(st.integers(1, 1000), min_size=1, max_size=7), replicas=st.integers(1, 3))
def test_largest_first_is_within_a_third_of_the_best(costs: list[int], replicas: int) -> None:
    shards = largest_first(costs, {str(replica): 0 for replica in range(replicas)})
    longest = max(sum(costs[item] for item in items) for items in shards.values())
    assert longest * 3 <= best(costs, replicas) * 4


def best(costs: Sequence[int], replicas: int) -> int:
    """The shortest longest shard, by trying everything."""
    return min(
        max(
            sum(cost for cost, there in zip(costs, choice, strict=True) if there == replica)
            for replica in range(replicas)
        )
        for choice in product(range(replicas), repeat=len(costs))
    )
