"""Metrics of one router process.

Series of replicas that are gone are removed, so that labels do not grow as replicas come and go.
"""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest


class RouterMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.outstanding_patches = Gauge(
            "encoder_router_outstanding_patches",
            "Patches that this router has on a replica.",
            ["replica"],
            registry=self.registry,
        )
        self.patches = Counter(
            "encoder_router_patches_total",
            "Patches that this router sent to a replica.",
            ["replica"],
            registry=self.registry,
        )
        self.shards = Counter(
            "encoder_router_shards_total", "Calls to replicas.", registry=self.registry
        )
        self.replans = Counter(
            "encoder_router_replans_total",
            "Items that were retried, mostly because their replica was lost or refused them.",
            registry=self.registry,
        )
        self.coalesced = Counter(
            "encoder_router_coalesced_total",
            "Items that joined an identical item in flight.",
            registry=self.registry,
        )
        self.held = Counter(
            "encoder_router_held_total",
            "Items sent to the replica whose cache should hold their embedding.",
            registry=self.registry,
        )
        self.rejections = Counter(
            "encoder_router_rejections_total",
            "Requests refused because too many patches were in flight.",
            registry=self.registry,
        )
        self._seen: set[str] = set()
        self._rendering = Lock()

    def sent(self, replica: str, patches: int) -> None:
        self.shards.inc()
        with self._rendering:
            self._seen.add(replica)
            self.patches.labels(replica).inc(patches)

    def render(self, own: Iterable[tuple[str, int]]) -> str:
        """Prometheus text, from any thread. `own`: patches on each replica that there is."""
        present = dict(own)
        with self._rendering:
            for replica in self._seen - present.keys():
                self.patches.remove(replica)
                self.outstanding_patches.remove(replica)
            self._seen = set(present)
            for replica, patches in present.items():
                self.patches.labels(replica)
                self.outstanding_patches.labels(replica).set(patches)
        return generate_latest(self.registry).decode()
