"""What Ray's object store of this machine holds."""

from __future__ import annotations

from dataclasses import dataclass

import ray
from ray._private.internal_api import node_stats


@dataclass(frozen=True)
class Used:
    bytes: int
    objects: int
    spilled_bytes: int


def used() -> Used:
    """Now."""
    (node,) = ray.nodes()
    stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], False).store_stats
    return Used(stats.object_store_bytes_used, stats.num_local_objects, stats.spilled_bytes_total)
