"""The replicas, as whoever sends them work sees them. Ray is router.py's business."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from actors.types import Dtype, Media, Reply


class ReplicaFull(Exception):
    """The replica has no room for one more call now."""


class ShardLost(Exception):
    """The replica is gone, or gave the call up."""


class ReplicaDied(ShardLost):
    """It took the call and died, perhaps of one of the items."""


class Fleet(Protocol):
    """The replicas."""

    def reports(self) -> tuple[int, Mapping[str, int]]:
        """A number that changes with every report, and what each replica reports to carry.

        Outstanding patches by replica, in the order of their ids.
        """

    async def encode(
        self, replica: str, media: list[Media], dtype: Dtype, timeout_seconds: float
    ) -> Reply:
        """The answers of one replica, in order, and what it still has to do.

        Raises ReplicaFull, ShardLost, or a ServiceError for all.
        """

    async def ask(self, replica: str) -> None:
        """Returns if the replica is well. Raises as `encode`; one that hangs never answers."""
