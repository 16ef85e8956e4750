"""The replicas as the dispatcher sees them, and as Serve last told this process of them.

serve_fleet.py implements `Fleet` over gRPC and Ray. Knows nothing of Ray itself: Serve pickles the
module of a request router (pinned.py) by value, so that state there would be a copy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping
from contextvars import Context
from dataclasses import dataclass
from typing import Any, Protocol

from actors.autoscaling import OUTSTANDING_PAIRS, OUTSTANDING_PATCHES
from actors.rpc.server import METADATA_KEY, Endpoint
from actors.types import Cost, Dtype, Media, Reply, Work

TYPICAL_PATCHES = 4096
"""Of the image by which the speeds of devices are compared."""


class ShardLost(Exception):
    """The replica is gone, or dropped the call."""


class ReplicaUnreachable(ShardLost):
    """The call never began: the replica was dead before, or cannot be reached."""


class ReplicaDied(ShardLost):
    """It died after the call was sent: perhaps of one of the items."""


class PinnedReplicaUnavailable(Exception):
    """The replica that a call is pinned to is gone, or does not take the call. Pickles."""


class Fleet(Protocol):
    def reports(self) -> Mapping[str, Replica]:
        """What each replica last said. Another object with every report."""

    def near(self) -> Collection[str]:
        """Those on this process's node: where loads are equal, they get the next item."""

    def listen(self, heard: Callable[[str, Work], None]) -> None:
        """From now on tells `heard` a replica and what it has to do, when the replica says so
        without being asked: when items of other routers came, and when none are left."""

    async def encode(
        self,
        replica: str,
        media: list[Media],
        dtype: Dtype,
        timeout_seconds: float,
        *,
        keep: bool,
        waiting_per_sent: float,
        early: Callable[[Reply], None] | None,
    ) -> Reply:
        """The answers of one replica, in order, and what it still has to do.

        `keep`: it keeps the embeddings for a while, each has its id and no data.
        `waiting_per_sent`: patches that wait for the replica, for the autoscaler. `early`: is given
        answers as they come, except the last. Raises ShardLost, or a ServiceError, for all items
        that were not answered early.
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
    outstanding_pairs: int = 0
    """Of the same work as the patches."""

    @property
    def work(self) -> Work:
        return Work(self.outstanding_patches, self.outstanding_pairs)

    @property
    def pool(self) -> str:
        """Of the configuration. Empty: there are none."""
        return str(self.metadata.get("pool", ""))

    @property
    def largest_item(self) -> tuple[int, ...] | None:
        """The most tokens on each path of what must fit one pack. None: other pools hold no more,
        and what is larger runs here without a graph."""
        given = self.metadata.get("largest_item")
        return None if given is None else tuple(given)

    @classmethod
    def of(cls, metadata: Mapping[str, Any], stats: Mapping[str, Any]) -> Replica:
        shown = {name: said for name, said in metadata.items() if name != METADATA_KEY}
        patches, pairs = stats.get(OUTSTANDING_PATCHES, 0), stats.get(OUTSTANDING_PAIRS, 0)
        return cls(shown, int(patches), Endpoint.of(metadata), int(pairs))


def costs(replicas: Mapping[str, Replica]) -> dict[str, Cost | None]:
    """What work costs on each replica; None: it did not say.

    Of replicas on devices of one name, the fastest measurement counts for all: they are equal, and
    the others were measured while something else ran there.
    """
    measured: dict[str, list[Cost]] = {}
    for replica in replicas.values():
        if cost := replica.metadata.get("cost"):
            measured.setdefault(replica.metadata["device"], []).append(Cost(**cost))
    fastest = {
        device: min(found, key=lambda cost: cost.seconds([TYPICAL_PATCHES]))
        for device, found in measured.items()
    }
    return {
        name: fastest[replica.metadata["device"]] if "cost" in replica.metadata else None
        for name, replica in replicas.items()
    }


PUBLISHED: dict[tuple[str, str], Mapping[str, Replica]] = {}
"""The replicas by id, of each deployment by its names (of the application, and its own).

Each publication is a new mapping. One per process, because Serve constructs request routers and
passes them nothing of ours; they may run in another thread than the reader's event loop.
"""


def detached(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """A task with an empty context: in a request's, Serve would cancel it with the request."""
    return asyncio.get_running_loop().create_task(work, context=Context())
