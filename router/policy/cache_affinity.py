"""Sends an item to the replica whose cache should hold its embedding. Pure.

A router remembers which embeddings it got from each replica: as many as the replica's cache holds,
evicting the least recently used. With one router that is exactly what the cache holds, with several
approximately. A wrong guess costs nothing but the choice of the replica.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from actors.types import DTYPE_BYTES, Embedding, Media, Shard
from router.policy.balance import Plan

PATIENCE = 9
"""An item goes to the replica that should hold it if that carries at most this many times the
item's own patches more than the least loaded one. A hit does not wait for that load but a miss
does, so this pays off even if one expected hit in ten is a miss."""
MAX_ENTRIES = 100_000
"""Embeddings remembered for each replica: some 30 MB, however small the embeddings are."""

Identity = tuple[str, ...]


class CacheAffinity:
    """A shadow of each replica's cache of `max_bytes`; 0: there are no caches."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._cached: dict[str, OrderedDict[Identity, int]] = {}
        """Bytes of each embedding, by replica."""
        self._bytes: dict[str, int] = {}
        self._replica: dict[Identity, str] = {}

    def __len__(self) -> int:
        return len(self._replica)

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


def plan_around(
    plan: Plan, costs: Sequence[int], loads: Mapping[str, int], placed: Mapping[int, str]
) -> list[Shard]:
    """Shards of all items. The others are planned as if the placed ones cost nothing.

    In the order of `loads`, none empty, the placed items of a shard first.
    """
    rest = [position for position in range(len(costs)) if position not in placed]
    items: dict[str, list[int]] = {replica: [] for replica in loads}
    for position, replica in placed.items():
        items[replica].append(position)
    for shard in plan([costs[position] for position in rest], loads):
        items[shard.replica] += [rest[item] for item in shard.items]
    return [
        Shard(replica, tuple(chosen), sum(costs[item] for item in chosen))
        for replica, chosen in items.items()
        if chosen
    ]
