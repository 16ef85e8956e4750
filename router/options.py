"""The `router` section of the configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from actors.options import Options, Reserved

Policy = Literal["largest_first", "round_robin", "power_of_two", "random"]


class RouterOptions(Options):
    """Balancing and admission."""

    replicas: PositiveInt = 1
    num_cpus: Reserved = 0.5
    policy: Policy = "largest_first"
    max_outstanding_patches: PositiveInt = 1_000_000
    """Maximum patches in flight through one router. Beyond it, requests fail with Overloaded."""
    max_queue_seconds: float = Field(20, gt=0)
    """Requests fail with Overloaded while the queue ahead of them would take longer than this, at
    the recent throughput of this router's items, and no replica is idle."""
    max_attempts: PositiveInt = 4
    """An item fails with Unavailable after this many replicas were lost while they had it, or
    refused it."""
    exclude_seconds: float = Field(5, ge=0)
    """How long a replica that was lost, or refused a call, gets no new work from this router."""
    stall_seconds: float = Field(10, gt=0)
    """A replica that answers no call for half of this time, and then no health check for the other
    half, counts as lost: its items are retried elsewhere, and it gets no new ones until it
    answers."""
    replica_wait_seconds: float = Field(5, ge=0)
    """How long work waits when there is no replica, before it fails with Unavailable."""
    coalesce: bool = True
    """Identical items in flight are encoded once."""
    cache_affinity: bool = True
    """An item goes to the replica whose cache should hold it, unless that replica is much
    busier."""


class RouterSection(Options):
    router: RouterOptions


LIVE_KEYS = RouterOptions.model_fields.keys() - {"replicas", "num_cpus", "stall_seconds"}
"""Options that can be changed while a router runs."""
