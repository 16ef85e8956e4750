"""The replicas of each deployment, as this process last heard of them.

Written by the request router's thread (pinned.py), read in the router's event loop
(serve_fleet.py). It is a module of its own because Serve pickles the module of a request router by
value: state kept there would be a copy. Knows nothing of Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

Deployment = tuple[str, str]
"""Names of the application and of the deployment."""


class PinnedReplicaUnavailable(Exception):
    """The replica that a call is pinned to is gone or not to be reached. Pickles."""


class PinnedReplicaFull(Exception):
    """The replica that a call is pinned to has `max_ongoing_requests` calls already. Pickles."""


@dataclass(frozen=True, slots=True)
class Replica:
    """What a replica says about itself."""

    metadata: Mapping[str, Any]
    """`record_replica_metadata`: once, when it became ready."""
    outstanding_patches: int
    """`record_routing_stats`: about once a second."""
    actor: Any = None
    """What calls it directly; None: only a handle does."""
    died: Callable[[], None] = lambda: None
    """To be told when a call finds it dead. From any thread."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Replicas by id, in the order of their ids. `version` grows with every publication."""

    version: int = 0
    replicas: Mapping[str, Replica] = field(default_factory=dict)


class Registry:
    """The last fleet of each deployment. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._fleets: dict[Deployment, Fleet] = {}

    def publish(self, deployment: Deployment, replicas: Mapping[str, Replica]) -> None:
        """Replaces what was known."""
        with self._lock:
            version = self._fleets.get(deployment, Fleet()).version + 1
            self._fleets[deployment] = Fleet(version, dict(sorted(replicas.items())))

    def fleet(self, deployment: Deployment) -> Fleet:
        """What is known."""
        with self._lock:
            return self._fleets.get(deployment, Fleet())


REGISTRY = Registry()
"""The one of this process: Serve constructs request routers and hands them nothing of ours."""
