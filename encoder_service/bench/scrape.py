"""What a service's /metrics say of the time between two looks at them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]
Samples = dict[tuple[str, Labels], float]


@dataclass(frozen=True, slots=True)
class Work:
    """Of all replicas together, unless it says otherwise."""

    patches: float
    hits: float
    misses: float
    tokens: float
    padded_tokens: float
    replica_patches: Mapping[str, float]
    """Patches that each replica encoded."""

    @property
    def hit_rate(self) -> float:
        """Items that a graph served, of all."""
        return ratio(self.hits, self.hits + self.misses)

    @property
    def padding(self) -> float:
        """Tokens computed for nobody, of all that were computed."""
        return ratio(self.padded_tokens, self.tokens + self.padded_tokens)

    @property
    def balance(self) -> float:
        """Patches of the busiest replica over the mean: 1 is even."""
        loads = self.replica_patches.values()
        return ratio(max(loads, default=0), sum(loads) / max(1, len(loads)))


def scrape(url: str) -> Samples:
    """All samples of GET /metrics."""
    page = httpx.get(f"{url}/metrics", timeout=30).raise_for_status().text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def work_between(before: Samples, after: Samples) -> Work:
    """What counters grew by. A replica that is in `after` alone began at zero."""
    grown = {key: value - before.get(key, 0) for key, value in after.items()}

    def total(name: str) -> float:
        return sum(value for (known, _), value in grown.items() if known == name)

    replicas = {
        dict(labels)["replica"]: value
        for (name, labels), value in grown.items()
        if name == "encoder_patches_total"
    }
    return Work(
        patches=total("encoder_patches_total"),
        hits=total("encoder_graph_hits_total"),
        misses=total("encoder_graph_misses_total"),
        tokens=total("encoder_tokens_total"),
        padded_tokens=total("encoder_padded_tokens_total"),
        replica_patches=replicas,
    )


def ratio(part: float, whole: float) -> float:
    """0 of nothing is 0."""
    return part / whole if whole else 0.0
