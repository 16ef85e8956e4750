"""How many encoder replicas the load needs. Serve's controller calls it.

Load is counted in outstanding patches, or the seconds that they take, because requests differ in
them by a factor of a thousand.
"""

from __future__ import annotations

import math
from typing import Any

OUTSTANDING_PATCHES = "outstanding_patches"
"""The metric that replicas report to the router and to Serve's autoscaler."""
OUTSTANDING_PAIRS = "outstanding_pairs"
"""Of the same work, to the router alone: see types.Work."""
OUTSTANDING_SECONDS = "outstanding_seconds"
"""Of the same work, by what the replica measured at start, to the autoscaler."""


class WorkPolicy:
    """Asks for enough replicas that each has `target` outstanding; Serve applies the bounds and
    delays of its AutoscalingConfig."""

    def __init__(self, target: float, metric: str = OUTSTANDING_PATCHES) -> None:
        self.target = target
        self.metric = metric

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The number of replicas, and the state to keep until the next call: none.

        `context`: Serve's AutoscalingContext, whose metrics are means over the look-back period.
        """
        reports = (context.aggregated_metrics or {}).get(self.metric)
        # No reports, as after a restart of the controller: keep the number of replicas.
        if not reports:
            return context.target_num_replicas, {}
        return max(1, math.ceil(sum(reports.values()) / self.target)), {}
