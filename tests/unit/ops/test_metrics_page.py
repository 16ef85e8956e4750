"""One page of all replicas' series."""

from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from actors.telemetry.metrics import EncoderMetrics
from encoder_service.llm.chat import ChatMetrics
from encoder_service.ops.exchange import ServiceMetrics
from encoder_service.ops.status import Page, Scrape, merge
from router.metrics import RouterMetrics


def samples(page: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def front_door(requests: int) -> str:
    metrics = ServiceMetrics()
    for _ in range(requests):
        metrics.record("http", "200", 0.004)
    return metrics.text()


def router() -> str:
    registry = CollectorRegistry()
    gauge = Gauge("encoder_router_outstanding_patches", "", ("replica",), registry=registry)
    gauge.labels("e1").set(7)
    return generate_latest(registry).decode()


def test_series_of_the_same_name_stand_side_by_side() -> None:
    scrape = Scrape((Page("Ingress", "a", front_door(2)), Page("Ingress", "b", front_door(3))), {})
    merged = merge(scrape)
    found = samples(merged)
    for replica, count in (("a", 2), ("b", 3)):
        labels = {"api": "http", "code": "200", "deployment": "Ingress", "replica": replica}
        assert found["encoder_requests_total", tuple(sorted(labels.items()))] == count
    assert merged.count(b"# TYPE encoder_requests_total counter") == 1
    assert merged.count(b"# TYPE encoder_request_seconds histogram") == 1


def test_histograms_stay_whole() -> None:
    merged = merge(Scrape((Page("Ingress", "a", front_door(2)),), {})).decode()
    assert 'encoder_request_seconds_bucket{api="http",deployment="Ingress",le="0.005"' in merged
    assert "encoder_request_seconds_count" in merged
    assert "encoder_request_seconds_sum" in merged


def test_created_samples_are_dropped() -> None:
    assert "_created" in front_door(1)
    assert b"_created" not in merge(Scrape((Page("Ingress", "a", front_door(1)),), {}))


def test_a_series_about_a_replica_keeps_its_label() -> None:
    found = samples(merge(Scrape((Page("Router", "r1", router()),), {})))
    labels = (("deployment", "Router"), ("replica", "e1"), ("reporter", "r1"))
    assert found["encoder_router_outstanding_patches", labels] == 7


def test_series_of_a_replica_name_its_pool() -> None:
    pages = Page("Router", "r1", router()), Page("Encoder-l4", "e1", front_door(1))
    found = samples(merge(Scrape(pages, {}, {"e1": "l4"})))
    labels = {"deployment": "Router", "pool": "l4", "replica": "e1", "reporter": "r1"}
    assert found["encoder_router_outstanding_patches", tuple(sorted(labels.items()))] == 7
    of_itself = {"deployment": "Encoder-l4", "pool": "l4", "replica": "e1"}
    labels = {"api": "http", "code": "200"} | of_itself
    assert found["encoder_requests_total", tuple(sorted(labels.items()))] == 1


def test_the_page_says_how_complete_it_is() -> None:
    found = samples(merge(Scrape((Page("Router", "r1", router()),), {"Encoder": 2, "Router": 0})))
    assert found["encoder_scraped_replicas", (("deployment", "Router"),)] == 1
    assert found["encoder_scraped_replicas", (("deployment", "Encoder"),)] == 0
    assert found["encoder_missing_replicas", (("deployment", "Encoder"),)] == 2
    assert found["encoder_missing_replicas", (("deployment", "Router"),)] == 0


def test_the_documentation_lists_every_metric() -> None:
    page = (Path(__file__).parents[3] / "docs" / "operations.md").read_text()
    listed = page.partition("## Metrics and the status page")[2].partition("\n## ")[0]
    for each in (EncoderMetrics(), RouterMetrics(), ServiceMetrics(), ChatMetrics()):
        for family in each.registry.collect():
            name = f"{family.name}_total" if family.type == "counter" else family.name
            assert f"`{name}`" in listed, name
