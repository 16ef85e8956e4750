"""The replicas as the dispatcher sees them. serve_fleet.py implements this over gRPC and Ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from actors.types import Dtype, Media, Reply


class ShardLost(Exception):
    """The replica is gone, or dropped the call."""


class ReplicaUnreachable(ShardLost):
    """The call never began: the replica was dead before, or cannot be reached."""


class ReplicaDied(ShardLost):
    """It died after the call had begun: perhaps of one of the items."""


class Fleet(Protocol):
    def reports(self) -> tuple[int, Mapping[str, int]]:
        """A number that changes with every report, and the outstanding patches of each replica."""

    async def encode(
        self, replica: str, media: list[Media], dtype: Dtype, timeout_seconds: float, *, keep: bool
    ) -> Reply:
        """The answers of one replica, in order, and what it still has to do.

        `keep`: it keeps the embeddings for a while, each has its id and no data. Raises ShardLost,
        or a ServiceError for all items.
        """

    async def check(self, replica: str) -> None:
        """Returns if the replica is healthy. Raises as `encode`; one that hangs never answers."""
