"""The autoscaling policy of encoder replicas, called by Serve's controller.

Load is measured in outstanding patches, or in the seconds that they take, because requests differ
in these by a factor of a thousand.
"""

from __future__ import annotations

import math
from typing import Any

OUTSTANDING_PATCHES = "outstanding_patches"
"""The metric that replicas report to the router and to Serve's autoscaler."""
OUTSTANDING_PAIRS = "outstanding_pairs"
"""The same work in pairs, reported to the router only: see types.Work."""
OUTSTANDING_SECONDS = "outstanding_seconds"
"""The same work in seconds, as measured at start, reported to the autoscaler only."""


class WorkPolicy:
    """Asks for as many replicas as keep each at `target` outstanding or below. Serve applies the
    bounds and delays of its AutoscalingConfig."""

    def __init__(self, target: float, metric: str = OUTSTANDING_PATCHES) -> None:
        self.target = target
        self.metric = metric

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Returns the number of replicas, and an empty state for the next call.

        `context`: Serve's AutoscalingContext, whose metrics are means over the look-back period.
        """
        reports = (context.aggregated_metrics or {}).get(self.metric)
        # No reports, as after a restart of the controller: keep the number of replicas.
        if not reports:
            return context.target_num_replicas, {}
        return max(1, math.ceil(sum(reports.values()) / self.target)), {}
