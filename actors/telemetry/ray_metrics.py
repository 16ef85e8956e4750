"""A copy of our series on Ray's own metrics ports, for whoever scrapes those: ray_encoder_*.

Every few seconds, by a thread. All are gauges that hold the totals, as Ray's counters only take
increments; Prometheus' `rate` does not mind. No series is about another replica: Ray never forgets
labels, and replicas come and go.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.util.metrics import Gauge

from actors.options import MetricsOptions

log = logging.getLogger("ray.serve")

Labels = tuple[tuple[str, str], ...]


class Mirror:
    """Ray's side of one page of series."""

    def __init__(self, deployment: str, replica: str) -> None:
        self.own = {"deployment": deployment, "replica": replica}
        self.gauges: dict[str, Gauge] = {}

    def show(self, text: str) -> None:
        """Copies a page in Prometheus' text format."""
        for (name, labels), value in summed(text).items():
            tags = dict(labels) | self.own
            if name not in self.gauges:
                self.gauges[name] = Gauge(name, "Copied from /metrics.", tuple(tags))
            self.gauges[name].set(value, tags)


def summed(text: str) -> dict[tuple[str, Labels], float]:
    """Values by name and labels. What is told of several replicas is added up."""
    found: dict[tuple[str, Labels], float] = {}
    for family in text_string_to_metric_families(text):
        if family.name.endswith("_created"):
            continue
        for sample in family.samples:
            kept = ((name, value) for name, value in sample.labels.items() if name != "replica")
            key = (sample.name, tuple(sorted(kept)))
            found[key] = found.get(key, 0.0) + sample.value
    return found


def start_mirror(options: MetricsOptions, text: Callable[[], str]) -> None:
    """Begins, if it is wanted. Called in a Serve replica; `text` in a thread."""
    if not options.ray_mirror_seconds:
        return
    context = serve.get_replica_context()
    mirror = Mirror(context.deployment, context.replica_id.unique_id)
    waiting = threading.Event()  # never set: the thread ends with the process

    def run() -> None:
        while not waiting.wait(options.ray_mirror_seconds):
            try:
                mirror.show(text())
            except Exception:  # the next time may be better, and nothing hangs on it
                log.warning("the series could not be copied to Ray's", exc_info=True)

    threading.Thread(target=run, name="mirror", daemon=True).start()
