"""The whole fleet: its series as one page, the document of GET /v1/status, and the page at `/`.

Counters and histograms of the document are totals since the replicas started. Clients compute rates
from two documents.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextvars import Context
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Generic, TypeVar

from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from actors.engine.traffic import ItemTokens
from encoder_service.ops.exchange import MOST_FAILURES, Failure

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Json = dict[str, Any]
Result = TypeVar("Result")

STAGES = ("decode_queue", "preprocess", "queue", "encode")
"""Stages of an item in its replica, in order. Each has a histogram of seconds."""


@dataclass(frozen=True, slots=True)
class Page:
    deployment: str
    replica: str
    text: str


@dataclass(frozen=True, slots=True)
class Scrape(Collector):
    """The series of all replicas that answered, and how many of each deployment did not."""

    pages: tuple[Page, ...]
    missing: dict[str, int]
    pools: Mapping[str, str] = field(default_factory=dict)
    """The pool of each encoder replica, if there are pools. Becomes the label `pool` of samples."""

    def families(self) -> Iterable[Metric]:
        """The families of all pages, labelled with deployment and replica. Those with the same name
        are merged."""
        merged: dict[str, Metric] = {}
        for page in self.pages:
            for family in text_string_to_metric_families(page.text):
                # prometheus_client adds a `_created` gauge to each counter and histogram.
                if not family.name.endswith("_created"):
                    known = merged.setdefault(
                        family.name, Metric(family.name, family.documentation, family.type)
                    )
                    for sample in family.samples:
                        labels = attributed(sample.labels, page, self.pools)
                        known.add_sample(sample.name, labels, sample.value)
        return merged.values()

    def collect(self) -> Iterator[Metric]:
        """The families, then how complete the scrape is."""
        yield from self.families()
        scraped = dict.fromkeys(self.missing, 0) | Counter(page.deployment for page in self.pages)
        yield gauge("encoder_scraped_replicas", "Replicas whose series are on this page.", scraped)
        yield gauge(
            "encoder_missing_replicas",
            "Replicas that did not answer in time; an unreachable deployment counts as one.",
            self.missing,
        )


def merge(scrape: Scrape) -> bytes:
    """All replicas' series as one page."""
    return generate_latest(scrape)


def attributed(labels: dict[str, str], page: Page, pools: Mapping[str, str]) -> dict[str, str]:
    """Adds the origin of a sample, and its replica's pool. Keeps a `replica` label that the sample
    already has."""
    source = "reporter" if "replica" in labels else "replica"
    found = labels | {"deployment": page.deployment, source: page.replica}
    pool = pools.get(found["replica"])
    return found | {"pool": pool} if pool else found


def gauge(name: str, help_text: str, values: Mapping[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, help_text, labels=["deployment"])
    for deployment, value in values.items():
        family.add_metric([deployment], value)
    return family


@dataclass(frozen=True, slots=True)
class Glance:
    """What one ingress saw of the whole fleet at about one moment."""

    scrape: Scrape
    excluded: Mapping[str, bool]
    """For every ready encoder replica: whether it failed recently and gets no new work."""
    failures: Sequence[Failure]
    item_tokens: Sequence[Mapping[str, int]] = ()
    """For each replica that answered: see ItemTokens.document."""
    precisions: Mapping[str, str] = field(default_factory=dict)
    """What each replica runs in: `bf16` or `fp8`."""


class SingleFlight(Generic[Result]):
    """Runs `work` once for all concurrent callers. Reuses its result for `seconds`."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, Result]], seconds: float) -> None:
        self._work = work
        self._seconds = seconds
        self._task: asyncio.Task[Result] | None = None
        self._until = 0.0

    async def get(self) -> Result:
        """Returns the result of `work`, which the first caller starts, and which finishes even if
        that caller leaves. Raises as `work` does."""
        loop = asyncio.get_running_loop()
        if self._task is None or (self._task.done() and loop.time() >= self._until):
            # An empty context, because in a request's own Serve would cancel its calls with the
            # request.
            self._task = loop.create_task(self._timed(), context=Context())
        return await asyncio.shield(self._task)

    async def _timed(self) -> Result:
        try:
            return await self._work()
        finally:
            self._until = asyncio.get_running_loop().time() + self._seconds


class Samples:
    """All values of a scrape, for summing. Names are given without `encoder_`."""

    def __init__(self, scrape: Scrape) -> None:
        self._by_name: defaultdict[str, list[Sample]] = defaultdict(list)
        for family in scrape.families():
            for sample in family.samples:
                self._by_name[sample.name].append(sample)

    def total(self, name: str, **labels: str) -> float:
        return sum(self.by(name, **labels).values())

    def by(self, name: str, *keys: str, **labels: str) -> dict[str, float]:
        """Sums by the values of the labels `keys`, joined by spaces."""
        sums: dict[str, float] = {}
        for sample in self._by_name[f"encoder_{name}"]:
            if labels.items() <= sample.labels.items():
                key = " ".join(sample.labels[each] for each in keys)
                sums[key] = sums.get(key, 0) + sample.value
        return sums

    def histogram(self, name: str) -> Json:
        """Sum, count, and [upper bound, count up to it] in order. The last bound is None."""
        buckets = {float(le): count for le, count in self.by(f"{name}_bucket", "le").items()}
        bounds = sorted(buckets)
        return {
            "sum": self.total(f"{name}_sum"),
            "count": self.total(f"{name}_count"),
            "buckets": [[None if at == float("inf") else at, buckets[at]] for at in bounds],
        }


def status(card: Json, cache_max_bytes: int, glance: Glance, time: float) -> Json:
    """The document. `cache_max_bytes`: size of one replica's cache. `time`: seconds since 1970."""
    samples = Samples(glance.scrape)
    answering = {page.replica for page in glance.scrape.pages}
    failures = sorted(glance.failures, key=lambda one: one.time, reverse=True)
    return {
        "time": time,
        "model": card["model"],
        "weights": card["weights"],
        "version": card["versions"]["encoder-service"],
        "ready": bool(glance.excluded),
        "missing": glance.scrape.missing,
        "replicas": [
            {
                "pool": glance.scrape.pools.get(name),
                "precision": glance.precisions.get(name) or None,
            }
            | replica(samples, name, excluded, name in answering)
            for name, excluded in sorted(glance.excluded.items())
        ],
        "paths": {
            path: graphs(samples, path, budgets)
            for path, budgets in card["graphs"]["token_budgets"].items()
        },
        "tokens": samples.total("tokens_total"),
        "patches": samples.total("patches_total"),
        "item_tokens": ItemTokens.sum(glance.item_tokens).document(),
        "items": samples.by("items_total", "source"),
        "item_failures": samples.by("item_failures_total", "error"),
        "cache": {
            "max_bytes": cache_max_bytes * len(glance.excluded),
            "bytes": samples.total("cache_bytes"),
        }
        | {name: samples.total(f"cache_{name}_total") for name in ("hits", "misses", "evictions")}
        | {
            f"shared_{name}": samples.total(f"shared_cache_{name}_total")
            for name in ("hits", "misses")
        },
        "requests": samples.by("requests_total", "api", "code"),
        "request_seconds": samples.histogram("request_seconds"),
        "stages": {name: samples.histogram(f"{name}_seconds") for name in STAGES},
        "router": {
            "outstanding_patches": samples.total("router_outstanding_patches")
            + samples.total("router_waiting_patches")
        }
        | {
            name: samples.total(f"router_{name}_total")
            for name in ("replans", "coalesced", "rejections")
        },
        "errors": [asdict(one) for one in failures[:MOST_FAILURES]],
    }


def replica(samples: Samples, name: str, excluded: bool, answers: bool) -> Json:
    """One encoder replica: what the routers report about it, and what it reports itself."""
    return {
        "replica": name,
        "excluded": excluded,
        "answers": answers,
        "outstanding_patches": samples.total("router_outstanding_patches", replica=name),
        "patches": samples.total("patches_total", replica=name),
        "items": samples.total("items_total", replica=name),
        "cache_bytes": samples.total("cache_bytes", replica=name),
        "graph_memory_bytes": samples.total("graph_memory_bytes", replica=name),
    }


def graphs(samples: Samples, path: str, budgets: Sequence[int]) -> Json:
    """Graph hits and misses of one path. Every captured budget is listed, used or not."""
    unused = {str(budget): 0.0 for budget in budgets}
    return {
        "hits": unused | samples.by("graph_hits_total", "budget", path=path),
        "misses": samples.by("graph_misses_total", "reason", path=path),
        "padded_tokens": samples.total("padded_tokens_total", path=path),
        "captured_graphs": samples.total("captured_graphs", path=path),
    }


@cache
def page() -> bytes:
    """The HTML page at `/`: one file without data, which requests /v1/status and nothing else."""
    return files("encoder_service.ops").joinpath("status.html").read_bytes()


@cache
def policy() -> str:
    """The page's Content-Security-Policy, which allows no script but its own and no host but ours.

    The page shows error messages, which may quote hostile clients.
    """
    (script,) = re.findall(rb"<script>(.*?)</script>", page(), re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
