"""The replicas as the dispatcher sees them, and as Serve last reported them to this process.

serve_fleet.py implements `Fleet` over gRPC and Ray. This module knows nothing of Ray. It holds the
published replicas, because Serve pickles the module of a request router (pinned.py) by value, so
state there would be a copy.
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
"""Patches of the image by which the speeds of devices are compared."""


class ShardLost(Exception):
    """The replica is gone, or dropped the call."""


class ReplicaUnreachable(ShardLost):
    """The call never began, because the replica was already dead or cannot be reached."""


class ReplicaDied(ShardLost):
    """The replica died after the call was sent, perhaps because of one of the items."""


class PinnedReplicaUnavailable(Exception):
    """The replica that a call is pinned to is gone, or does not take the call. Can be pickled."""


class Fleet(Protocol):
    def reports(self) -> Mapping[str, Replica]:
        """What each replica last reported. Each report makes a new object."""

    def near(self) -> Collection[str]:
        """The replicas on this process's node. If loads are equal, they get the next item."""

    def listen(self, heard: Callable[[str, Work], None]) -> None:
        """From now on calls `heard` with a replica and its outstanding work when the replica sends
        that on its own: when items of other routers arrived, and when none are left."""

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
        """Returns the answers of one replica, in order, and its outstanding work.

        With `keep`, the replica keeps the embeddings for a while, and each has an id and no data.
        `waiting_per_sent`: patches that wait for the replica per patch sent to it, for the
        autoscaler. `early` is called with answers as they arrive, except the last. Raises ShardLost
        or a ServiceError for all items that were not answered early.
        """

    async def check(self, replica: str) -> None:
        """Returns if the replica is healthy. Raises as `encode` does. Never returns if it hangs."""

    async def reach(self, replica: str) -> None:
        """Returns if the replica's node answers, whatever the replica does. Raises OSError."""


@dataclass(frozen=True, slots=True)
class Replica:
    """What a replica reports about itself."""

    metadata: Mapping[str, Any]
    """From `record_replica_metadata`, once when the replica became ready. Without the endpoint and
    its token."""
    outstanding_patches: int
    """From `record_routing_stats`, about once a second."""
    endpoint: Endpoint | None = None
    """None: it speaks another version of the protocol, or none."""
    outstanding_pairs: int = 0
    """Pairs of patches that attend to each other, of the same work."""

    @property
    def work(self) -> Work:
        return Work(self.outstanding_patches, self.outstanding_pairs)

    @property
    def pool(self) -> str:
        """The pool's name in the configuration. Empty: there are no pools."""
        return str(self.metadata.get("pool", ""))

    @property
    def node(self) -> str:
        """Ray's id of its node. Empty: unknown."""
        return self.endpoint.node if self.endpoint else ""

    @property
    def precision(self) -> str:
        """What its layers run in: `bf16` or `fp8`. Empty: a replica of another release."""
        return str(self.metadata.get("precision", ""))

    @property
    def largest_item(self) -> tuple[int, ...] | None:
        """Maximum tokens of an item on each path, because the item must fit one pack. None: other
        pools hold no more, and larger items run here without a graph."""
        given = self.metadata.get("largest_item")
        return None if given is None else tuple(given)

    @classmethod
    def of(cls, metadata: Mapping[str, Any], stats: Mapping[str, Any]) -> Replica:
        shown = {name: said for name, said in metadata.items() if name != METADATA_KEY}
        patches, pairs = stats.get(OUTSTANDING_PATCHES, 0), stats.get(OUTSTANDING_PAIRS, 0)
        return cls(shown, int(patches), Endpoint.of(metadata), int(pairs))


def costs(replicas: Mapping[str, Replica]) -> dict[str, Cost | None]:
    """What work costs on each replica. None: the replica did not report it.

    The fastest measurement on devices of one name counts for all of them, because they are equal
    and the others were measured while something else ran there.
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
"""The replicas by id, for each (application name, deployment name).

Each publication is a new mapping. Global to the process, because Serve constructs request routers
and passes them nothing of ours. They may run in another thread than the reader's event loop.
"""


def detached(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Starts a task with an empty context, because in a request's context Serve would cancel it
    with the request."""
    return asyncio.get_running_loop().create_task(work, context=Context())
