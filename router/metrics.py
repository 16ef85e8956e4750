"""Metrics of one router process."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from threading import Lock

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest


class RouterMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, namespace="encoder", registry=self.registry)
        self.outstanding_patches = Gauge(
            "encoder_router_outstanding_patches",
            "Patches in flight from this router to a replica.",
            ["replica"],
            registry=self.registry,
        )
        self.waiting_patches = Gauge(
            "encoder_router_waiting_patches",
            "Patches of admitted requests that wait in this router until replicas have room.",
            registry=self.registry,
        )
        self.patches = counter(
            "router_patches_total", "Patches that this router sent to a replica.", ["replica"]
        )
        self.bytes = counter(
            "router_bytes_total",
            "Bytes of items sent to replicas and of rows received; `node` is local if the replica "
            "is on this router's node, else remote.",
            ["what", "node"],
        )
        self.shards = counter("router_shards_total", "Calls to replicas.")
        self.replans = counter(
            "router_replans_total",
            "Items retried, mostly because their replica was lost or refused them.",
        )
        self.coalesced = counter(
            "router_coalesced_total", "Items that joined an identical item in flight."
        )
        self.held = counter(
            "router_held_total",
            "Items sent to the replica whose cache should hold their embedding.",
        )
        self.rejections = counter(
            "router_rejections_total",
            "Requests rejected because too many patches were in flight or the queue was too long.",
        )
        self._seen: set[str] = set()
        self._rendering = Lock()

    def sent(self, replica: str, patches: int) -> None:
        self.shards.inc()
        with self._rendering:
            self._seen.add(replica)
            self.patches.labels(replica).inc(patches)

    def render(self, own: Mapping[str, int], waiting: int) -> str:
        """Returns Prometheus text. May be called from any thread. `own`: patches on each existing
        replica. `waiting`: patches on none.

        Series of replicas that are gone are removed, so that labels do not accumulate.
        """
        with self._rendering:
            self.waiting_patches.set(waiting)
            for replica in self._seen - own.keys():
                self.patches.remove(replica)
                self.outstanding_patches.remove(replica)
            self._seen = set(own)
            for replica, patches in own.items():
                self.patches.labels(replica)
                self.outstanding_patches.labels(replica).set(patches)
        return generate_latest(self.registry).decode()
