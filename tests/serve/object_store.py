"""What Ray's object stores hold, and the memory of processes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import ray
from ray._private.internal_api import node_stats


@dataclass(frozen=True)
class Used:
    bytes: int
    objects: int
    spilled_bytes: int
    """Written to disk since the start."""
    overflow_bytes: int
    """Part of `bytes` that had no room in memory, in files."""


def used(node_id: str | None = None) -> Used:
    """What is used now, on all nodes or on one."""
    found = [
        node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], False).store_stats
        for node in ray.nodes()
        if node["Alive"] and node_id in {None, node["NodeID"]}
    ]
    return Used(
        sum(stats.object_store_bytes_used for stats in found),
        sum(stats.num_local_objects for stats in found),
        sum(stats.spilled_bytes_total for stats in found),
        sum(stats.object_store_bytes_fallback for stats in found),
    )


def own_private_bytes(_: object) -> int:
    """Private memory of the process that this runs in, in bytes."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


def direct_objects(_: object) -> int:
    """Objects of Ray's direct transport known to the process that this runs in."""
    return len(ray._private.worker.global_worker.rdt_manager._managed_rdt_metadata)


def own_process(_: object) -> int:
    """Id of the process that this runs in."""
    return os.getpid()
