"""The `router` section of the configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from actors.options import Options

Policy = Literal["largest_first", "round_robin", "power_of_two", "random"]


class RouterOptions(Options):
    """Balancing and admission."""

    replicas: PositiveInt = 1
    num_cpus: float = Field(0.5, ge=0)
    policy: Policy = "largest_first"
    max_outstanding_patches: PositiveInt = 1_000_000
    """Patches in flight through one router; beyond it requests are refused with Overloaded."""
    max_queue_seconds: float = Field(20, gt=0)
    """Requests are refused with Overloaded while the queue before them takes longer, at the recent
    throughput of this router's items, and no replica is idle."""
    max_attempts: PositiveInt = 4
    """An item is Unavailable after this many replicas were lost while they had it, or refused
    it."""
    exclude_seconds: float = Field(5, ge=0)
    """How long a replica that was lost, or refused a call, gets no new work from this router."""
    stall_seconds: float = Field(10, gt=0)
    """A replica that answers no call for half of this time, and then no health check for the other
    half, is given up: its items are retried elsewhere, and it gets no new ones until it answers."""
    replica_wait_seconds: float = Field(5, ge=0)
    """How long work waits for a replica when there is none, before it is Unavailable."""
    coalesce: bool = True
    """Identical items in flight are encoded once."""
    cache_affinity: bool = True
    """An item goes to the replica whose cache should hold it, unless that has much more to do."""


class RouterSection(Options):
    router: RouterOptions


LIVE_KEYS = RouterOptions.model_fields.keys() - {"replicas", "num_cpus", "stall_seconds"}
"""Can be changed while a router runs."""
