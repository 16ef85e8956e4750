"""Which replica holds an item's embedding in its cache, and items sent there. Pure.

Goes by what this router had from each replica, as much as the replica's cache holds, least recently
used out first: with one router that is what is there, with several about that. Being wrong costs
an item nothing but the place where it is encoded.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from actors.types import DTYPE_BYTES, Embedding, Media, Shard
from router.policy.balance import Plan

PATIENCE = 9
"""How many times its own patches an item's holder may carry more than the least loaded replica. A
hit waits for nothing, a miss behind all of it: pays if one in ten is pushed out meanwhile."""
MOST_ENTRIES = 100_000
"""Of one replica that are remembered: some 30 MB, however small the embeddings are."""

Identity = tuple[str, ...]


class Holders:
    """A shadow of each replica's cache of `max_bytes`; with 0 there are none."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: dict[str, OrderedDict[Identity, int]] = {}
        self._bytes: dict[str, int] = {}
        self._holder: dict[Identity, str] = {}

    def __len__(self) -> int:
        return len(self._holder)

    def saw(self, media: Media, embedding: Embedding) -> None:
        """A replica gave this, so that its cache has it now."""
        size = math.prod(embedding.shape) * DTYPE_BYTES[embedding.dtype]
        if size > self._max_bytes:
            return
        replica, identity = embedding.replica, media.identity
        self._forget(identity)
        held = self._held.setdefault(replica, OrderedDict())
        held[identity] = size
        self._holder[identity] = replica
        self._bytes[replica] = self._bytes.get(replica, 0) + size
        while self._bytes[replica] > self._max_bytes or len(held) > MOST_ENTRIES:
            self._forget(next(iter(held)))

    def keep(self, replicas: Mapping[str, object]) -> None:
        """Forgets replicas that are gone."""
        for replica in self._held.keys() - replicas.keys():
            for identity in self._held.pop(replica):
                del self._holder[identity]
            del self._bytes[replica]

    def place(self, media: Sequence[Media], loads: Mapping[str, int]) -> dict[int, str]:
        """The replica of each item that goes to its holder, by position."""
        least = min(loads.values(), default=0)
        found = {}
        for position, item in enumerate(media):
            replica = self._holder.get(item.identity, "")
            if replica in loads and loads[replica] - least <= PATIENCE * item.plan.patches:
                found[position] = replica
        return found

    def _forget(self, identity: Identity) -> None:
        replica = self._holder.pop(identity, None)
        if replica is not None:
            self._bytes[replica] -= self._held[replica].pop(identity)


def plan_around(
    plan: Plan, costs: Sequence[int], loads: Mapping[str, int], placed: Mapping[int, str]
) -> list[Shard]:
    """Shards of all items. What is not placed is planned as if the rest cost nothing: it is there.

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
