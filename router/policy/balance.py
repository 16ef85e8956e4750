"""Which replica takes which item. Pure: costs and loads in, shards out.

Knows neither replicas nor clocks nor where the costs come from.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from random import Random

from actors.types import Shard
from router.options import Policy

Plan = Callable[[Sequence[int], Mapping[str, int]], list[Shard]]
"""From the costs of items in patches, and the outstanding patches of each replica, to shards.

Every item is in exactly one shard, in the order in which it was assigned; shards are in the order
of `loads`, and none is empty. Raises ValueError where there is no replica.
"""


def largest_first(costs: Sequence[int], loads: Mapping[str, int]) -> list[Shard]:
    """Greedy: sizes descending, each to the least loaded replica. Ties: the earlier one.

    On idle replicas the longest shard is within 4/3 of the best possible (Graham, 1969).
    """
    replicas = some(loads)
    heap = [(load, place) for place, load in enumerate(loads.values())]
    heapq.heapify(heap)
    chosen: list[list[int]] = [[] for _ in replicas]
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        load, place = heap[0]
        chosen[place].append(item)
        heapq.heapreplace(heap, (load + costs[item], place))
    return shards(costs, replicas, chosen)


def round_robin() -> Plan:
    """In turn, regardless of sizes and loads; the turn carries over from plan to plan."""
    turn = count()

    def plan(costs: Sequence[int], loads: Mapping[str, int]) -> list[Shard]:
        replicas = some(loads)
        chosen: list[list[int]] = [[] for _ in replicas]
        for item in range(len(costs)):
            chosen[next(turn) % len(replicas)].append(item)
        return shards(costs, replicas, chosen)

    return plan


def power_of_two(random: Random) -> Plan:
    """Each item to the less loaded of two replicas drawn at random."""

    def plan(costs: Sequence[int], loads: Mapping[str, int]) -> list[Shard]:
        replicas = some(loads)
        load = list(loads.values())
        chosen: list[list[int]] = [[] for _ in replicas]
        for item, cost in enumerate(costs):
            pair = random.sample(range(len(replicas)), min(2, len(replicas)))
            place = min(pair, key=lambda place: load[place])
            load[place] += cost
            chosen[place].append(item)
        return shards(costs, replicas, chosen)

    return plan


def one_of(random: Random) -> Plan:
    """Each item to a replica drawn at random: the baseline for the other policies."""

    def plan(costs: Sequence[int], loads: Mapping[str, int]) -> list[Shard]:
        replicas = some(loads)
        chosen: list[list[int]] = [[] for _ in replicas]
        for item in range(len(costs)):
            random.choice(chosen).append(item)
        return shards(costs, replicas, chosen)

    return plan


POLICIES: dict[Policy, Callable[[Random], Plan]] = {
    "largest_first": lambda random: largest_first,
    "round_robin": lambda random: round_robin(),
    "power_of_two": power_of_two,
    "random": one_of,
}


def some(loads: Mapping[str, int]) -> list[str]:
    if not loads:
        raise ValueError("there is no replica to plan for")
    return list(loads)


def shards(
    costs: Sequence[int], replicas: Sequence[str], chosen: Sequence[Sequence[int]]
) -> list[Shard]:
    return [
        Shard(replica, tuple(items), sum(costs[item] for item in items))
        for replica, items in zip(replicas, chosen, strict=True)
        if items
    ]
