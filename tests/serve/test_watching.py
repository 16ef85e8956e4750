"""Observability of a real service: traces and logs of one request, the status page."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from encoder_service.wire import encoder_pb2 as pb
from encoder_service.wire.encoder_grpc import EncoderStub
from tests.chromium import chromium, there
from tests.images import jpeg
from tests.serve.conftest import Cluster
from tests.serve.tiny import BEARER, TOKEN, running
from tests.unit.ops.test_monitoring import RAY

pytestmark = pytest.mark.extended

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
SLOW = 60
"""Seconds in which even a busy machine has written its logs."""

Line = dict[str, Any]


@pytest.fixture(scope="module")
def traces(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the spans, while the service runs."""
    folder = tmp_path_factory.mktemp("spans")
    tracing = {"export": "file", "folder": str(folder)}
    with running("watched", tracing=tracing, logging={"format": "json"}):
        yield folder


def lines(folder: Path, pattern: str, wanted: Callable[[Line], bool], count: int) -> list[Line]:
    """The `wanted` lines of JSON, as soon as there are `count` of them."""
    end = time.monotonic() + SLOW
    while True:
        texts = [file.read_text() for file in folder.glob(pattern)]
        found = [
            json.loads(line) for text in texts for line in text.splitlines() if line[:1] == "{"
        ]
        found = [line for line in found if wanted(line)]
        if len(found) >= count or time.monotonic() > end:
            assert len(found) == count, found
            return found
        time.sleep(0.1)


def of_trace(trace: str) -> Callable[[Line], bool]:
    return lambda span: bool(span["context"]["trace_id"] == "0x" + trace)


def test_a_trace_goes_from_the_door_to_the_replay(cluster: Cluster, traces: Path) -> None:
    headers = {"authorization": BEARER, "traceparent": TRACEPARENT, "x-request-id": "mine"}
    files = [("image", jpeg(96, 64)), ("image", jpeg(64, 64))]
    with httpx.Client(base_url=cluster.http, headers=headers, timeout=SLOW) as client:
        client.post("/v1/encode", files=files).raise_for_status()
    # Two items on two replicas: one shard each.
    spans = lines(traces, "*.jsonl", of_trace(TRACE), 1 + 2 * 4)
    by_id = {span["context"]["span_id"]: span for span in spans}

    def way(span: Line) -> str:
        above = by_id.get(span["parent_id"])
        return f"{way(above) if above else span['parent_id']} {span['name']}"

    door = f"0x{PARENT} encode"
    assert Counter(way(span) for span in spans) == {
        door: 1,
        f"{door} route": 2,
        f"{door} route shard": 2,
        f"{door} route shard preprocess": 2,
        f"{door} route shard replay": 2,
    }
    assert {span["attributes"]["encoder.request_id"] for span in spans} == {"mine"}
    (first,) = [span["attributes"] for span in spans if span["name"] == "encode"]
    assert (first["encoder.items"], first["encoder.patches"]) == (2, 40)
    shards = [span["attributes"] for span in spans if span["name"] == "shard"]
    assert sorted(one["encoder.patches"] for one in shards) == [16, 24]
    assert len({one["encoder.replica"] for one in shards}) == 2
    replays = [span["attributes"] for span in spans if span["name"] == "replay"]
    assert {one["encoder.source"] for one in replays} == {"graph"}


def test_grpc_metadata_carry_it_too(cluster: Cluster, traces: Path) -> None:
    trace = TRACE[::-1]
    metadata = [
        ("authorization", BEARER),
        ("traceparent", f"00-{trace}-{PARENT}-01"),
        ("request_id", "over-grpc"),
    ]
    request = pb.EncodeRequest(items=[pb.Item(type="image", data=jpeg(64, 64))])
    with grpc.insecure_channel(cluster.grpc) as channel:
        stub = EncoderStub(channel)
        (chunk,) = stub.EncodeStream(request, metadata=metadata, timeout=SLOW)
    assert chunk.last
    spans = lines(traces, "*.jsonl", of_trace(trace), 5)
    assert {span["name"] for span in spans} == {"encode", "route", "shard", "preprocess", "replay"}
    assert {span["attributes"]["encoder.request_id"] for span in spans} == {"over-grpc"}


@pytest.mark.usefixtures("traces")
def test_the_logs_of_door_and_replica_name_the_request(cluster: Cluster) -> None:
    headers = {"authorization": BEARER, "x-request-id": "broken-one"}
    with httpx.Client(base_url=cluster.http, headers=headers, timeout=SLOW) as client:
        answer = client.post("/v1/encode", files={"image": jpeg(96, 64)[:-400]})

    def of_request(line: Line) -> bool:
        return bool(line.get("request_id") == "broken-one")

    (access,) = lines(cluster.logs, "*Ingress*", of_request, 1)
    assert (access["api"], access["code"]) == ("http", str(answer.status_code))
    assert access["items"] == 1
    assert access["seconds"] > 0
    (failed,) = lines(cluster.logs, "*Encoder*", of_request, 1)
    assert failed["message"].startswith("an item of grid (1, 4, 6) failed: ")
    assert failed["deployment"] == "watched_Encoder"


@pytest.mark.usefixtures("traces")
def test_the_status_document_counts_what_was_served(cluster: Cluster) -> None:
    with httpx.Client(
        base_url=cluster.http, headers={"authorization": BEARER}, timeout=SLOW
    ) as client:
        client.post("/v1/encode", files={"image": jpeg(96, 64)}).raise_for_status()
        client.post("/v1/encode", files={"image": b"no image"}, headers={"x-request-id": "no"})
        end = time.monotonic() + SLOW
        while True:  # the status is about a second old
            seen = client.get("/v1/status").raise_for_status().json()
            if any(one["request_id"] == "no" for one in seen["errors"]):
                break
            assert time.monotonic() < end, seen
            time.sleep(0.2)
    assert seen["ready"] is True
    assert [one["answers"] for one in seen["replicas"]] == [True, True]
    assert [one["precision"] for one in seen["replicas"]] == ["bf16", "bf16"]
    assert sum(seen["paths"]["default"]["hits"].values()) >= 1
    assert seen["request_seconds"]["count"] == sum(seen["requests"].values()) >= 2
    assert seen["items"]["graph"] == sum(one["items"] for one in seen["replicas"])


@pytest.mark.usefixtures("traces")
def test_ray_has_the_series_that_the_alerts_and_the_dashboard_ask_it_for(cluster: Cluster) -> None:
    """For k8s/monitoring. tests/unit/ops/test_monitoring.py takes these series for granted."""
    end = time.monotonic() + SLOW
    with httpx.Client(timeout=SLOW) as client:
        while True:
            families = list(text_string_to_metric_families(client.get(cluster.ray_metrics).text))
            found = [sample for family in families for sample in family.samples]
            missing = RAY.keys() - {sample.name for sample in found}
            if missing <= {"ray_node_gram_used"}:  # there is no GPU here
                break
            assert time.monotonic() < end, missing
            time.sleep(0.5)
    for name, labels in RAY.items():
        samples = [one for one in found if one.name == name]
        assert all(labels <= one.labels.keys() for one in samples), (name, samples[:1])


@pytest.mark.browser
@pytest.mark.skipif(not there(), reason="needs chromium and chromedriver")
@pytest.mark.usefixtures("traces")
def test_the_page_asks_for_the_token_and_then_lives(cluster: Cluster) -> None:
    headers = {"authorization": BEARER, "x-request-id": "<b>bold</b>"}
    with chromium() as window, httpx.Client(headers=headers, timeout=SLOW) as client:
        window.open(cluster.http)
        window.until("!document.getElementById('door').hidden")
        fill = "document.getElementById('token').value = {!r}; document.forms[0].requestSubmit()"
        window.run(fill.format("wrong"))
        window.until("document.getElementById('wrong').textContent")
        refused = window.complaints()
        assert all("401" in line for line in refused), refused
        window.run(fill.format(TOKEN))
        window.until("looks.length >= 2")
        assert "2 replicas ready" in window.text()
        assert "Graphs: default" in window.text()
        client.post(f"{cluster.http}/v1/encode", files={"image": jpeg(64, 64)})
        client.post(f"{cluster.http}/v1/encode", json={"items": [{"url": "<script>alert(1)"}]})
        # The page updates itself, and shows what clients sent as text.
        window.until("document.body.innerText.includes('/s\\n') && looks.length >= 4")
        window.until("document.body.innerText.includes('http 400')")
        assert window.run("return document.querySelectorAll('main script, main b').length") == 0
        images = ", ".join(f"main {one}:not([aria-label])" for one in ("svg", ".track", ".columns"))
        assert window.run(f"return document.querySelectorAll('{images}').length") == 0
        without = "{hits: {}, misses: {too_large: 1}, captured_graphs: 0, padded_tokens: 0}"
        card = window.run(f"return path({{tokens: 1}}, 'global', {without}).textContent")
        assert "too large" in card
        window.scheme("light")
        ground = "return getComputedStyle(document.body).backgroundColor"
        light = window.run(ground)
        window.scheme("dark")
        assert window.run(ground) != light
        assert window.complaints() == []
        assert window.run("return document.documentElement.scrollWidth <= innerWidth")
