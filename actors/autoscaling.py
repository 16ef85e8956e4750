"""How many encoder replicas the load asks for. Pure; Serve's controller calls it.

Load is counted in outstanding patches, as everywhere: requests differ in them by a thousand times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

OUTSTANDING_PATCHES = "outstanding_patches"
"""What replicas report, to the router and to Serve's autoscaler."""


class Situation(Protocol):
    """The part of Serve's AutoscalingContext that is read."""

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None:
        """By metric and replica, the mean over the time that the autoscaler looks back."""

    @property
    def target_num_replicas(self) -> int:
        """Replicas that there are, or are being started."""


class PatchPolicy:
    """As many replicas as it takes to have `target_patches` outstanding on each.

    Serve applies the bounds and the delays of its AutoscalingConfig to what this asks for.
    """

    def __init__(self, target_patches: int) -> None:
        self.target_patches = target_patches

    def __call__(self, situation: Situation) -> tuple[int, dict[str, Any]]:
        """Replicas, and what to remember until the next time: nothing."""
        reports = (situation.aggregated_metrics or {}).get(OUTSTANDING_PATCHES)
        # Without a report nothing is known, as after a restart of the controller: no change.
        if not reports:
            return situation.target_num_replicas, {}
        return max(1, math.ceil(sum(reports.values()) / self.target_patches)), {}
