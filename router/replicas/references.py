"""Embeddings kept by the replicas that encoded them, fetched by id through any router.

An id is `<replica>.<name>`; nobody can guess the name. What a replica keeps is lost with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from actors.errors import NotFound, Unavailable
from actors.store.kept import Kept
from router.replicas.fleet import ShardLost


class Keepers(Protocol):
    """The replicas. Calls raise ShardLost or a ServiceError."""

    def reports(self) -> tuple[int, Mapping[str, int]]:
        """See fleet.Fleet."""

    async def fetch(self, replica: str, name: str) -> Kept | None:
        """What is kept under a name."""

    async def release(self, replica: str, name: str) -> bool:
        """Drops what is kept under a name. False: there was nothing."""


class KeptEmbeddings:
    def __init__(self, fleet: Keepers) -> None:
        self._fleet = fleet

    async def fetch(self, reference: str) -> Kept:
        replica, name = self._find(reference)
        try:
            kept = await self._fleet.fetch(replica, name)
        except ShardLost as error:
            raise Unavailable(f"replica {replica} cannot be reached: try again") from error
        if kept is None:
            raise unknown(reference)
        return kept

    async def release(self, reference: str) -> None:
        replica, name = self._find(reference)
        try:
            released = await self._fleet.release(replica, name)
        except ShardLost as error:
            raise Unavailable(f"replica {replica} cannot be reached: try again") from error
        if not released:
            raise unknown(reference)

    def _find(self, reference: str) -> tuple[str, str]:
        """Replica and name. Raises NotFound where there is no such replica."""
        replicas = self._fleet.reports()[1]
        if not replicas:
            raise Unavailable("no encoder replica is known here yet: try again")
        replica, _, name = reference.partition(".")
        if replica not in replicas:
            raise unknown(reference)
        return replica, name


def unknown(reference: str) -> NotFound:
    return NotFound(
        f"no embedding is kept under {reference[:100]!r}: it expired, was released or evicted, or "
        "its replica ended; encode the item again"
    )
