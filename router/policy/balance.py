"""Which replica takes which item: by load, and by whose cache should hold the embedding. Pure.

Knows neither clocks nor where costs and loads come from.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from random import Random

from actors.types import DTYPE_BYTES, Embedding, Media
from router.options import Policy

PATIENCE = 9
"""An item goes to the replica whose cache should hold it if that carries at most this many times
the item's own patches more than the least loaded one. A hit does not wait for that load but a miss
does, so this pays off even if one expected hit in ten is a miss."""
MAX_ENTRIES = 100_000
"""Embeddings remembered for each replica: some 30 MB, however small the embeddings are."""

Shards = dict[str, list[int]]
"""The positions of each replica's items, in the order in which they were assigned."""

Plan = Callable[[Sequence[int], Mapping[str, int]], Shards]
"""From the costs of items in patches, and the outstanding patches of each replica, to shards.

Every item is in exactly one shard; shards are in the order of the loads, and none is empty. Raises
ValueError where there is no replica.
"""

Identity = tuple[str, ...]


def largest_first(costs: Sequence[int], loads: Mapping[str, int]) -> Shards:
    """Greedy: sizes descending, each to the least loaded replica. Ties: the earlier one.

    On idle replicas the longest shard is within 4/3 of the best possible (Graham, 1969).
    """
    shards = none_assigned(loads)
    heap = [(load, place, replica) for place, (replica, load) in enumerate(loads.items())]
    heapq.heapify(heap)
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        load, place, replica = heap[0]
        shards[replica].append(item)
        heapq.heapreplace(heap, (load + costs[item], place, replica))
    return without_empty(shards)


def one_by_one(choose: Callable[[Mapping[str, int]], str]) -> Plan:
    """Items in their order, each to the replica that is chosen from the loads so far."""

    def plan(costs: Sequence[int], loads: Mapping[str, int]) -> Shards:
        shards, load = none_assigned(loads), dict(loads)
        for item, cost in enumerate(costs):
            replica = choose(load)
            load[replica] += cost
            shards[replica].append(item)
        return without_empty(shards)

    return plan


def round_robin() -> Plan:
    """In turn, regardless of sizes and loads; the turn carries over from plan to plan."""
    turn = count()
    return one_by_one(lambda loads: list(loads)[next(turn) % len(loads)])


def power_of_two(random: Random) -> Plan:
    """Each item to the less loaded of two replicas drawn at random."""

    def less_loaded(loads: Mapping[str, int]) -> str:
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


def plan_around(
    plan: Plan, costs: Sequence[int], loads: Mapping[str, int], placed: Mapping[int, str]
) -> Shards:
    """Shards of all items, placed ones first. The others are planned as if those cost nothing."""
    shards = none_assigned(loads)
    for position, replica in placed.items():
        shards[replica].append(position)
    rest = [position for position in range(len(costs)) if position not in placed]
    for replica, items in plan([costs[position] for position in rest], loads).items():
        shards[replica] += [rest[item] for item in items]
    return without_empty(shards)


def none_assigned(loads: Mapping[str, int]) -> Shards:
    if not loads:
        raise ValueError("there is no replica to plan for")
    return {replica: [] for replica in loads}


def without_empty(shards: Shards) -> Shards:
    return {replica: items for replica, items in shards.items() if items}


class CacheAffinity:
    """Which replica's cache should hold an embedding.

    Remembers which embeddings came from each replica: as many as its cache of `max_bytes` holds
    (0: there are no caches), evicting the least recently used. With one router that is exactly
    what the cache holds, with several approximately. A wrong guess costs nothing but the choice of
    the replica.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._cached: dict[str, OrderedDict[Identity, int]] = {}
        """Bytes of each embedding, by replica."""
        self._bytes: dict[str, int] = {}
        self._replica: dict[Identity, str] = {}

    def saw(self, media: Media, embedding: Embedding) -> None:
        """A replica gave this, so its cache holds it now."""
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

    def place(self, media: Sequence[Media], loads: Mapping[str, int]) -> dict[int, str]:
        """The replica of each item that should be cached and is worth the wait, by position."""
        least = min(loads.values(), default=0)
        placed = {}
        for position, item in enumerate(media):
            replica = self._replica.get(item.identity, "")
            if replica in loads and loads[replica] - least <= PATIENCE * item.plan.patches:
                placed[position] = replica
        return placed

    def _forget(self, identity: Identity) -> None:
        replica = self._replica.pop(identity, None)
        if replica is not None:
            self._bytes[replica] -= self._cached[replica].pop(identity)
