"""The replicas as the dispatcher sees them, and as Serve last told this process of them.

serve_fleet.py implements `Fleet` over gRPC and Ray. Knows nothing of Ray itself: Serve pickles the
module of a request router (pinned.py) by value, so that state there would be a copy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Mapping
from contextvars import Context
from dataclasses import dataclass
from typing import Any, Protocol

from actors.autoscaling import OUTSTANDING_PATCHES
from actors.rpc.server import METADATA_KEY, Endpoint
from actors.types import Dtype, Media, Reply


class ShardLost(Exception):
    """The replica is gone, or dropped the call."""


class ReplicaUnreachable(ShardLost):
    """The call never began: the replica was dead before, or cannot be reached."""


class ReplicaDied(ShardLost):
    """It died after the call had begun: perhaps of one of the items."""


class PinnedReplicaUnavailable(Exception):
    """The replica that a call is pinned to is gone, or does not take the call. Pickles."""


class Fleet(Protocol):
    def reports(self) -> Mapping[str, int]:
        """The outstanding patches of each replica. Another object with every report."""

    def near(self) -> Collection[str]:
        """Those on this process's node: where loads are equal, they get the next item."""

    async def encode(
        self, replica: str, media: list[Media], dtype: Dtype, timeout_seconds: float, *, keep: bool
    ) -> Reply:
        """The answers of one replica, in order, and what it still has to do.

        `keep`: it keeps the embeddings for a while, each has its id and no data. Raises ShardLost,
        or a ServiceError for all items.
        """

    async def check(self, replica: str) -> None:
        """Returns if the replica is healthy. Raises as `encode`; one that hangs never answers."""

    async def reach(self, replica: str) -> None:
        """Returns if the replica's node answers, whatever the replica does. Raises OSError."""


@dataclass(frozen=True, slots=True)
class Replica:
    """What a replica says about itself."""

    metadata: Mapping[str, Any]
    """`record_replica_metadata`, without the endpoint and its token: once, when it was ready."""
    outstanding_patches: int
    """`record_routing_stats`: about once a second."""
    endpoint: Endpoint | None = None
    """None: it speaks another version of the protocol, or none."""

    @classmethod
    def of(cls, metadata: Mapping[str, Any], stats: Mapping[str, Any]) -> Replica:
        shown = {name: said for name, said in metadata.items() if name != METADATA_KEY}
        return cls(shown, int(stats.get(OUTSTANDING_PATCHES, 0)), Endpoint.of(metadata))


PUBLISHED: dict[tuple[str, str], Mapping[str, Replica]] = {}
"""The replicas by id, of each deployment by its names (of the application, and its own).

Each publication is a new mapping. One per process, because Serve constructs request routers and
passes them nothing of ours; they may run in another thread than the reader's event loop.
"""


def detached(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """A task with an empty context: in a request's, Serve would cancel it with the request."""
    return asyncio.get_running_loop().create_task(work, context=Context())
