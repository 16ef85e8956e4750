"""The series of the front door, and those that ingress.py scrapes, merged into one page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


class ServiceMetrics:
    """Series of one ingress replica. `api`: http, grpc, grpc_stream or chat."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "encoder_requests_total",
            "Requests to encode, by the status of their response.",
            ("api", "code"),
            registry=self.registry,
        )
        self.request_seconds = Histogram(
            "encoder_request_seconds",
            "Seconds from the first byte of a request to encode to the last byte of its response.",
            ("api",),
            buckets=SECONDS,
            registry=self.registry,
        )

    def record(self, api: str, code: str, seconds: float) -> None:
        self.requests.labels(api, code).inc()
        self.request_seconds.labels(api).observe(seconds)

    def text(self) -> str:
        return generate_latest(self.registry).decode()


@dataclass(frozen=True, slots=True)
class Page:
    deployment: str
    replica: str
    text: str


@dataclass(frozen=True, slots=True)
class Scrape:
    """The series of all replicas that answered, and how many of each deployment did not."""

    pages: tuple[Page, ...]
    missing: dict[str, int]


def merge(scrape: Scrape) -> bytes:
    """All replicas' series as one page, labelled with deployment and replica."""
    registry = CollectorRegistry()
    registry.register(Merged(scrape))
    return generate_latest(registry)


class Merged(Collector):
    """A scrape as a collector: families of the same name are merged."""

    def __init__(self, scrape: Scrape) -> None:
        self.scrape = scrape

    def collect(self) -> Iterator[Metric]:
        """The families of all pages, then how complete the scrape is."""
        families: dict[str, Metric] = {}
        for page in self.scrape.pages:
            for family in text_string_to_metric_families(page.text):
                # prometheus_client adds a `_created` gauge to each counter and histogram.
                if not family.name.endswith("_created"):
                    known = families.setdefault(
                        family.name, Metric(family.name, family.documentation, family.type)
                    )
                    for sample in family.samples:
                        labels = attributed(sample.labels, page)
                        known.add_sample(sample.name, labels, sample.value)
        yield from families.values()
        scraped: dict[str, int] = dict.fromkeys(self.scrape.missing, 0)
        for page in self.scrape.pages:
            scraped[page.deployment] = scraped.get(page.deployment, 0) + 1
        yield gauge(
            "encoder_scraped_replicas", "Replicas whose series are in this page.", scraped.items()
        )
        yield gauge(
            "encoder_missing_replicas",
            "Replicas that did not answer in time; an unreachable deployment counts as one.",
            self.scrape.missing.items(),
        )


def attributed(labels: dict[str, str], page: Page) -> dict[str, str]:
    """Adds the origin of a sample. A `replica` label that it already has is kept."""
    source = "reporter" if "replica" in labels else "replica"
    return labels | {"deployment": page.deployment, source: page.replica}


def gauge(name: str, help_text: str, values: Iterable[tuple[str, int]]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, help_text, labels=["deployment"])
    for deployment, value in values:
        family.add_metric([deployment], value)
    return family
