"""The status document from pages of replicas, and the page that shows it."""

from __future__ import annotations

import asyncio
import re
from hashlib import sha256

from starlette.testclient import TestClient

from actors.families.registry import read
from actors.telemetry.metrics import EncoderMetrics
from encoder_service.api.answer import model_card
from encoder_service.api.http import build
from encoder_service.config import AuthOptions, ServiceOptions
from encoder_service.ops.exchange import Failure, ServiceMetrics
from encoder_service.ops.status import Glance, Page, Scrape, SingleFlight, status
from encoder_service.service import Service
from router.metrics import RouterMetrics
from tests.unit.front_door import MODEL, Fleet, service

CARD = model_card(ServiceOptions(model=MODEL), read(MODEL))


def encoder(hits: int, patches: int) -> str:
    series = EncoderMetrics()
    series.graph_hits.labels("default", "64", "cpu").inc(hits)
    series.graph_misses.labels("default", "beyond_budgets").inc()
    series.items.labels("image", "graph").inc(hits)
    series.patches.inc(patches)
    series.tokens.inc(60)
    series.padded_tokens.labels("default").inc(4)
    series.cache_bytes.set(100)
    series.shared_cache_hits.inc(2)
    series.shared_cache_misses.inc()
    series.queue_seconds.observe(0.003)
    return series.text()


def door(count: int) -> str:
    series = ServiceMetrics()
    for _ in range(count):
        series.record("http", "200", 0.004)
    router = RouterMetrics()
    return series.text() + router.render({"e1": 7, "e2": 0}, 5)


def failure(time: float) -> Failure:
    return Failure(time, "http", "429", "overloaded", "full", "r")


SCRAPE = Scrape(
    (
        Page("Encoder", "e1", encoder(3, 300)),
        Page("Encoder", "e2", encoder(1, 100)),
        Page("Ingress", "i1", door(2)),
        Page("Ingress", "i2", door(3)),
    ),
    {"Router": 1},
)
GLANCE = Glance(
    SCRAPE,
    {"e2": True, "e1": False, "e3": False},
    [failure(1.0), failure(2.0)],
    [{"64": 2, "128": 1}, {"64": 5}],
)


def test_all_replicas_are_added_up() -> None:
    seen = status(CARD, 1000, GLANCE, 12.0)
    assert (seen["time"], seen["model"], seen["weights"]) == (12.0, "qwen3vl-tiny", "dummy")
    graphs = seen["paths"]["default"]
    assert graphs["hits"]["64"] == 4
    assert set(graphs["hits"]) == {str(b) for b in CARD["graphs"]["token_budgets"]["default"]}
    assert (graphs["misses"], graphs["padded_tokens"]) == ({"beyond_budgets": 2}, 8)
    assert (seen["tokens"], seen["patches"], seen["items"]) == (120, 400, {"graph": 4})
    assert seen["requests"] == {"http 200": 5}
    assert seen["request_seconds"]["count"] == 5
    assert [0.005, 5] in seen["request_seconds"]["buckets"]
    assert seen["request_seconds"]["buckets"][-1] == [None, 5]
    assert seen["stages"]["queue"]["count"] == 2
    assert (seen["cache"]["bytes"], seen["cache"]["max_bytes"]) == (200, 3000)
    assert (seen["cache"]["shared_hits"], seen["cache"]["shared_misses"]) == (4, 2)
    assert seen["router"]["outstanding_patches"] == 24
    assert seen["missing"] == {"Router": 1}
    assert seen["item_tokens"] == {"64": 7, "128": 1}


def test_each_replica_has_its_own_numbers_and_what_routers_say_of_it() -> None:
    first, second, third = status(CARD, 0, GLANCE, 0)["replicas"]
    assert (first["replica"], first["patches"], first["outstanding_patches"]) == ("e1", 300, 14)
    assert (first["excluded"], second["excluded"]) == (False, True)
    assert (second["patches"], second["answers"], third["answers"]) == (100, True, False)


def test_replicas_of_pools_have_their_numbers_and_their_pool() -> None:
    assert [one["pool"] for one in status(CARD, 0, GLANCE, 0)["replicas"]] == [None] * 3
    pages = (Page("Encoder-l4", "e1", encoder(3, 300)), Page("Encoder-h200", "e2", encoder(1, 100)))
    scrape = Scrape(pages, {}, {"e1": "l4", "e2": "h200"})
    precisions = {"e1": "bf16", "e2": "fp8"}
    glance = Glance(scrape, {"e1": False, "e2": False}, (), precisions=precisions)
    seen = status(CARD, 0, glance, 0)["replicas"]
    assert [(one["pool"], one["patches"]) for one in seen] == [("l4", 300), ("h200", 100)]
    assert [one["precision"] for one in seen] == ["bf16", "fp8"]


def test_errors_are_the_latest_first() -> None:
    assert [one["time"] for one in status(CARD, 0, GLANCE, 0)["errors"]] == [2.0, 1.0]


def test_a_fleet_without_replicas_is_not_ready() -> None:
    seen = status(CARD, 1000, Glance(Scrape((), {"Encoder": 1}), {}, ()), 0)
    assert (seen["ready"], seen["replicas"], seen["requests"]) == (False, [], {})
    assert seen["stages"]["encode"] == {"sum": 0, "count": 0, "buckets": []}


def test_many_who_look_are_one_look() -> None:
    fleet = Fleet()
    one = service(fleet)
    one.status = SingleFlight(one.look, seconds=3600)
    with TestClient(build(one)) as http:
        answers = [http.get("/v1/status").json() for _ in range(5)]
    assert answers[0]["ready"] is True
    assert fleet.glances == 1


async def test_work_goes_on_when_the_first_who_asked_goes_away() -> None:
    begun, may_end, runs = asyncio.Event(), asyncio.Event(), []

    async def work() -> int:
        runs.append(1)
        begun.set()
        await may_end.wait()
        return len(runs)

    flight = SingleFlight(work, seconds=3600)
    first, second = (asyncio.ensure_future(flight.get()) for _ in range(2))
    await begun.wait()
    first.cancel()
    may_end.set()
    assert await second == 1
    assert await flight.get() == 1
    stale = SingleFlight(work, seconds=0)
    assert (await stale.get(), await stale.get()) == (2, 3)


def test_the_status_asks_for_the_token_and_the_page_does_not() -> None:
    auth = AuthOptions(token_sha256=(sha256(b"let me in").hexdigest(),))
    one = Service(ServiceOptions(model=MODEL, auth=auth), read(MODEL), Fleet())
    with TestClient(build(one)) as http:
        assert http.get("/v1/status").status_code == 401
        good = http.get("/v1/status", headers={"authorization": "Bearer let me in"})
        assert good.json()["model"] == "qwen3vl-tiny"
        page = http.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")


def test_the_page_loads_nothing_and_never_writes_markup() -> None:
    with TestClient(build(service(Fleet()))) as http:
        page = http.get("/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy
    assert not re.search(r"(src|href)=\"(?!data:,)", page.text)
    assert "http://" not in page.text.replace("http://www.w3.org/", "")
    assert not re.search(r"innerHTML|outerHTML|AdjacentHTML|document\.write|eval\(", page.text)
