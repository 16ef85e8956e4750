"""k8s/monitoring: every query of the rules and the dashboard is about series that there are.

The series are taken from the registries themselves, with the labels that the merged page adds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from prometheus_client import Histogram
from prometheus_client.metrics import MetricWrapperBase

from actors.telemetry.metrics import EncoderMetrics
from encoder_service.ops.exchange import ServiceMetrics
from encoder_service.ops.status import Page, Scrape, attributed, merge
from router.metrics import RouterMetrics
from tests.manifests import built

FOLDER = Path(__file__).parents[3] / "k8s" / "monitoring"
RULES = FOLDER / "rules.yaml"
DASHBOARD = FOLDER / "dashboard.json"

TARGET = {"namespace", "pod", "container", "job", "endpoint", "instance", "ray_io_cluster"}
"""What Prometheus adds for a PodMonitor."""
RAY = {
    "ray_object_store_memory": {"Location", "ObjectState"},
    "ray_resources": {"Name", "State"},
    "ray_node_gram_used": {"GpuIndex", "GpuDeviceName"},
}
"""Of Ray's own series, those that we use: as Ray's dashboards do (dashboard/modules/metrics)."""

Labels = frozenset[str]
NUMBER = frozenset({"a number has no labels"})


@cache
def known() -> dict[str, set[str]]:
    """The labels of every series, by its name as Prometheus stores it."""
    series = {name: labels | TARGET for name, labels in RAY.items()}
    for kind in (EncoderMetrics, RouterMetrics, ServiceMetrics):
        for metric in vars(kind()).values():
            if isinstance(metric, MetricWrapperBase):
                found = dict.fromkeys(metric._labelnames, "")
                labels = set(attributed(found, Page("", "", ""), {})) | TARGET
                for name, more in stored(metric):
                    series[name] = labels | more
    page = merge(Scrape((), {"Encoder": 0})).decode()
    for name in re.findall(r"^# TYPE (\S+) gauge$", page, re.MULTILINE):
        series[name] = {"deployment"} | TARGET
    return series


def stored(metric: MetricWrapperBase) -> Iterator[tuple[str, set[str]]]:
    """The names that one metric has, and the labels that come with each of them."""
    name = metric._name
    if isinstance(metric, Histogram):
        yield f"{name}_bucket", {"le"}
        yield f"{name}_sum", set()
        yield f"{name}_count", set()
    else:
        yield name + ("_total" if metric._type == "counter" else ""), set()


def labels_of(node: Any) -> Labels:
    """The labels of an expression's result. Asserts that it can have one."""
    match type(node).__name__:
        case "NumberLiteral" | "StringLiteral":
            return NUMBER
        case "ParenExpr":
            return labels_of(node.expr)
        case "MatrixSelector":
            return labels_of(node.vector_selector)
        case "VectorSelector":
            assert node.name in known(), f"no such series: {node.name}"
            asked = {matcher.name for matcher in node.matchers.matchers}
            assert asked <= known()[node.name], f"{node.name} has no {asked - known()[node.name]}"
            return frozenset(known()[node.name])
        case "Call":
            return labels_of_call(node.func.name, list(node.args))
        case "AggregateExpr":
            inner = labels_of(node.expr)
            by = frozenset(node.modifier.labels if node.modifier else ())
            assert not node.modifier or node.modifier.type == promql.AggModifierType.By
            assert by <= inner, f"{node} has no {by - inner}"
            return by
        case "BinaryExpr":
            sides = {labels_of(node.lhs), labels_of(node.rhs)} - {NUMBER}
            assert len(sides) == 1, f"{node}: the sides never match"
            return sides.pop()
    raise AssertionError(f"not known here: {node!r}")


def labels_of_call(function: str, arguments: list[Any]) -> Labels:
    inner = labels_of(arguments[-1])
    match function:
        case "rate":
            assert type(arguments[0]).__name__ == "MatrixSelector"
            return inner
        case "absent":
            return frozenset()
        case "histogram_quantile":
            assert "le" in inner, "a histogram needs le"
            return inner - {"le"}
    raise AssertionError(f"not known here: {function}")


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["spec"]["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def query(expression: str) -> Any:
    """Parsed as Prometheus would; Grafana's variables stand for what they become."""
    return promql.parse(expression.replace("$__rate_interval", "5m"))


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: str(rule["alert"]))
def test_a_rule_asks_for_what_there_is(rule: dict[str, Any]) -> None:
    labels = labels_of(query(rule["expr"]))
    told = " ".join(rule["annotations"].values())
    assert set(re.findall(r"\$labels\.(\w+)", told)) <= labels
    assert set(rule["annotations"]) == {"summary", "description"}
    assert rule["labels"]["severity"] in ("critical", "warning", "info")


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: str(panel["title"]))
def test_a_panel_asks_for_what_there_is(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        labels = labels_of(query(target["expr"]))
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels
        # Each selector keeps to the namespaces that were chosen.
        selectors = re.findall(r"\b(?:encoder|ray)_\w+", target["expr"])
        assert target["expr"].count('namespace=~"$namespace"') == len(selectors)


def test_every_series_of_ours_that_tells_of_trouble_is_on_the_dashboard() -> None:
    shown = " ".join(target["expr"] for panel in panels() for target in panel["targets"])
    ours = {re.sub(r"_(bucket|sum|count)$", "", name) for name in known()} - RAY.keys()
    left_out = {name for name in ours if name not in shown}
    assert left_out <= {
        "encoder_captured_graphs",
        "encoder_item_tokens",
        "encoder_measured_seconds",
        "encoder_pruned_patches_total",
        "encoder_reference_device_bytes",
        "encoder_references",
        "encoder_references_held",
        "encoder_router_bytes_total",
        "encoder_router_patches_total",
        "encoder_router_shards_total",
        "encoder_unsent_bytes",
    }, left_out


@pytest.mark.parametrize(
    "expression",
    [
        "rate(encoder_grapf_hits_total[5m])",
        'rate(encoder_graph_hits_total{bucket="64"}[5m])',
        "sum by (budget) (rate(encoder_graph_misses_total[5m]))",
        "sum by (path) (encoder_tokens_total)",
        "histogram_quantile(0.5, sum by (path) (rate(encoder_queue_seconds_bucket[5m])))",
        "sum(encoder_tokens_total) / sum by (replica) (encoder_patches_total)",
        "rate(encoder_queue_seconds[5m])",
    ],
)
def test_a_wrong_query_is_found(expression: str) -> None:
    with pytest.raises(AssertionError):
        labels_of(query(expression))


def test_kustomize_builds_the_folder_and_it_chooses_pods_that_there_are() -> None:
    documents = built(FOLDER)
    kinds = sorted(document["kind"] for document in documents)
    assert kinds == ["ConfigMap", "PodMonitor", "PodMonitor", "PrometheusRule"]
    (dashboard,) = [one for one in documents if one["kind"] == "ConfigMap"]
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(dashboard["data"]["encoder-service.json"])["panels"]
    service = (FOLDER.parent / "base" / "rayservice.yaml").read_text()
    for monitor in (one for one in documents if one["kind"] == "PodMonitor"):
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            assert f"{{name: {endpoint['port']}, containerPort:" in service
        for label, value in monitor["spec"]["selector"]["matchLabels"].items():
            # KubeRay itself sets ray.io/*.
            assert label.startswith("ray.io/") or f"{label}: {value}" in service
