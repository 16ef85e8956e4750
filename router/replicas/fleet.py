"""The replicas, as whoever sends them work sees them. Ray is serve_fleet.py's business."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from actors.types import Answer, Dtype, Embedding, Media, Reply


class ReplicaFull(Exception):
    """The replica has no room for one more call now."""


class ShardLost(Exception):
    """The replica is gone, or gave the call up."""


class ReplicaDied(ShardLost):
    """It took the call, or was about to, and died: perhaps of one of the items."""


class Fleet(Protocol):
    """The replicas."""

    def reports(self) -> tuple[int, Mapping[str, int]]:
        """A number that changes with every report, and what each replica reports to carry.

        Outstanding patches by replica, in the order of their ids.
        """

    async def encode(
        self,
        replica: str,
        media: list[Media],
        dtype: Dtype,
        timeout_seconds: float,
        *,
        keep: bool,
        careful: bool,
    ) -> Reply:
        """The answers of one replica, in order, and what it still has to do.

        `keep`: it keeps the embeddings for a while, each has its id and no data. Raises
        ReplicaFull, ShardLost, or a ServiceError for all; with `careful` ReplicaDied only where it
        had taken the call for certain, which takes longer to know.
        """

    async def keep_again(self, answer: Embedding, count: int) -> list[Answer]:
        """The same embedding under so many more ids. EmbeddingLost: it is no longer kept.

        Raises ReplicaFull or ShardLost.
        """

    async def ask(self, replica: str) -> None:
        """Returns if the replica is well. Raises as `encode`; one that hangs never answers."""
