"""Assigns items to replicas by load, and by which cache should hold the embedding. Pure.

Knows neither clocks nor where costs and loads come from.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from random import Random
from typing import NamedTuple

from actors.types import DTYPE_BYTES, Embedding, Media
from router.options import Policy

PATIENCE = 9
"""An item goes to the replica whose cache should hold it if the load of that replica exceeds the
least load by at most this many times the item's cost. A hit does not wait for that load but a miss
does, so this pays off even if one expected hit in ten is a miss."""
MAX_ENTRIES = 100_000
"""Maximum embeddings remembered per replica, in some 30 MB, however small the embeddings are."""

Shards = dict[str, list[int]]
"""The positions of each replica's items, in the order in which they were assigned."""


class ReplicaGroup(NamedTuple):
    """Replicas of equal speed. Costs and loads are in patches or in seconds, the same in all
    groups."""

    costs: Sequence[float]
    """The cost of each item on these replicas."""
    loads: Mapping[str, float]
    """The work that each replica has to do first."""


Plan = Callable[[Sequence[ReplicaGroup]], Shards]
"""Makes shards from the replicas and the costs of the items there.

Every item is in exactly one shard. Shards are in the order of the loads, and none is empty. Raises
ValueError if there is no replica.
"""

Identity = tuple[str, ...]


def largest_first(groups: Sequence[ReplicaGroup]) -> Shards:
    """Greedy: assigns items by descending size, each to the replica that would finish it first.
    Ties go to the earlier group, and within a group to the earlier replica.

    On idle replicas of one group, the longest shard is within 4/3 of the best possible (Graham,
    1969).
    """
    shards = none_assigned(groups)
    heaps = []
    for costs, loads in groups:
        heap = [(load, place, replica) for place, (replica, load) in enumerate(loads.items())]
        heapq.heapify(heap)
        heaps.append((costs, heap))
    sizes = groups[0].costs
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        costs, heap = min(heaps, key=lambda group: group[0][item] + group[1][0][0])
        load, place, replica = heap[0]
        shards[replica].append(item)
        heapq.heapreplace(heap, (load + costs[item], place, replica))
    return without_empty(shards)


def one_by_one(choose: Callable[[Mapping[str, float]], str]) -> Plan:
    """Assigns items in their order, each to the replica that is chosen from the loads so far."""

    def plan(groups: Sequence[ReplicaGroup]) -> Shards:
        shards = none_assigned(groups)
        costs = {replica: group.costs for group in groups for replica in group.loads}
        load = {replica: load for group in groups for replica, load in group.loads.items()}
        for item in range(len(groups[0].costs)):
            replica = choose(load)
            load[replica] += costs[replica][item]
            shards[replica].append(item)
        return without_empty(shards)

    return plan


def round_robin() -> Plan:
    """Replicas in turn, regardless of sizes and loads. The turn carries over between plans."""
    turn = count()
    return one_by_one(lambda loads: list(loads)[next(turn) % len(loads)])


def power_of_two(random: Random) -> Plan:
    """Each item to the less loaded of two replicas drawn at random."""

    def less_loaded(loads: Mapping[str, float]) -> str:
        pair = random.sample(list(loads), min(2, len(loads)))
        return min(pair, key=lambda replica: loads[replica])

    return one_by_one(less_loaded)


def one_of(random: Random) -> Plan:
    """Each item to a replica drawn at random: the baseline for the other policies."""
    return one_by_one(lambda loads: random.choice(list(loads)))


POLICIES: dict[Policy, Callable[[Random], Plan]] = {
    "largest_first": lambda random: largest_first,
    "round_robin": lambda random: round_robin(),
    "power_of_two": power_of_two,
    "random": one_of,
}


def plan_around(plan: Plan, groups: Sequence[ReplicaGroup], placed: Mapping[int, str]) -> Shards:
    """Shards of all items, placed ones first. The others are planned as if placed ones cost
    nothing."""
    shards = none_assigned(groups)
    for position, replica in placed.items():
        shards[replica].append(position)
    rest = [position for position in range(len(groups[0].costs)) if position not in placed]
    left = [ReplicaGroup([costs[position] for position in rest], loads) for costs, loads in groups]
    for replica, items in plan(left).items():
        shards[replica] += [rest[item] for item in items]
    return without_empty(shards)


def none_assigned(groups: Sequence[ReplicaGroup]) -> Shards:
    if not any(group.loads for group in groups):
        raise ValueError("there is no replica to plan for")
    return {replica: [] for group in groups for replica in group.loads}


def without_empty(shards: Shards) -> Shards:
    return {replica: items for replica, items in shards.items() if items}


class CacheAffinity:
    """Predicts which replica's cache holds an embedding.

    Remembers the latest embeddings from each replica, as many as its cache of `max_bytes` holds
    (0: there are no caches), and evicts the least recently used. With one router this is exactly
    what the cache holds, with several it is approximate. A wrong guess only affects the choice of
    the replica.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._cached: dict[str, OrderedDict[Identity, int]] = {}
        """Bytes of each embedding, per replica."""
        self._bytes: dict[str, int] = {}
        self._replica: dict[Identity, str] = {}

    def saw(self, media: Media, embedding: Embedding) -> None:
        """Records that a replica returned this embedding, so that its cache holds it now."""
        size = math.prod(embedding.shape) * DTYPE_BYTES[embedding.dtype]
        if size > self._max_bytes:
            return
        replica, identity = embedding.replica, media.identity
        self._forget(identity)
        cached = self._cached.setdefault(replica, OrderedDict())
        cached[identity] = size
        self._replica[identity] = replica
        self._bytes[replica] = self._bytes.get(replica, 0) + size
        while self._bytes[replica] > self._max_bytes or len(cached) > MAX_ENTRIES:
            self._forget(next(iter(cached)))

    def keep(self, replicas: Mapping[str, object]) -> None:
        """Forgets replicas that are gone."""
        for replica in self._cached.keys() - replicas.keys():
            for identity in self._cached.pop(replica):
                del self._replica[identity]
            del self._bytes[replica]

    def place(self, media: Sequence[Media], groups: Sequence[ReplicaGroup]) -> dict[int, str]:
        """The replica for each item that should be in its cache, if it is worth the wait, by the
        item's position."""
        least = min((load for group in groups for load in group.loads.values()), default=0)
        placed = {}
        for position, item in enumerate(media):
            replica = self._replica.get(item.identity, "")
            for costs, loads in groups:
                if replica in loads and loads[replica] - least <= PATIENCE * costs[position]:
                    placed[position] = replica
        return placed

    def _forget(self, identity: Identity) -> None:
        replica = self._replica.pop(identity, None)
        if replica is not None:
            self._bytes[replica] -= self._cached[replica].pop(identity)
