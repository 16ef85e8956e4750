"""The replicas of each deployment, as Serve last told this process of them.

Written by the request router's thread (pinned.py), read in the event loop of ServeFleet. A module
of its own, because Serve pickles the module of a request router by value: state there would be a
copy. Knows nothing of Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from actors.autoscaling import OUTSTANDING_PATCHES
from actors.rpc.server import METADATA_KEY, Endpoint

Deployment = tuple[str, str]  # names of the application and of the deployment


class PinnedReplicaUnavailable(Exception):
    """The replica that a call is pinned to is gone, or does not take the call. Pickles."""


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


@dataclass(frozen=True, slots=True)
class Members:
    """Replicas by id, in the order of their ids. `version` grows with every publication."""

    version: int = 0
    replicas: Mapping[str, Replica] = field(default_factory=dict)


class Membership:
    """The last members of each deployment. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._members: dict[Deployment, Members] = {}

    def publish(self, deployment: Deployment, replicas: Mapping[str, Replica]) -> None:
        with self._lock:
            version = self._members.get(deployment, Members()).version + 1
            self._members[deployment] = Members(version, dict(sorted(replicas.items())))

    def members(self, deployment: Deployment) -> Members:
        with self._lock:
            return self._members.get(deployment, Members())


MEMBERSHIP = Membership()
"""One per process, because Serve constructs request routers and passes them nothing of ours."""
