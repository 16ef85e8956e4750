"""Encoders on CPUs, some of them slowed down.

Balanced by seconds, slow ones get less than by patches. Pools of them serve as one fleet.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from time import monotonic, sleep
from typing import Any

import httpx
import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from torch import Tensor

from actors.encoder import Encoder
from actors.engine.device import Device
from actors.options import ActorOptions
from encoder_service import Client, ServiceError, app
from tests.images import jpeg
from tests.processes import actors
from tests.serve.conftest import Cluster
from tests.serve.test_manifests import deploy
from tests.serve.test_service_kill import load, ready_replicas
from tests.serve.tiny import ARGS, running
from tests.waiting import within

pytestmark = [pytest.mark.extended, pytest.mark.timeout(600)]

SLOWER = 4
TOKEN_SECONDS = 2e-4
"""For encoders that are not slowed down. Their real work on top of it is a fraction of it."""
CALLERS, REQUESTS = 4, 25
SAME = 8
"""How often each image is in a request that several pools share."""


class Unequal(Encoder):
    """The pool `slow`, or without pools the first replica, takes SLOWER times as long."""

    def __init__(self, options: ActorOptions, pool: str = "", *more: Any) -> None:
        fast = pool == "fast" if pool else serve.get_replica_context().rank.rank
        slower = 1 if fast else SLOWER

        def capture(
            device: Device, run: Callable[[], Tensor], **options: object
        ) -> Callable[[], Tensor]:
            def replay() -> Tensor:
                began = monotonic()
                rows = run()
                working = monotonic() - began
                sleep(slower * TOKEN_SECONDS * len(rows) + (slower - 1) * working)
                return rows

            return replay

        Device.capture, Device.name = capture, f"cpu / {slower}"  # type: ignore[assignment, method-assign]
        super().__init__(options, pool, *more)
        self.series.measured_seconds.labels("slower").set(slower)


class Unmeasured(Unequal):
    async def record_replica_metadata(self) -> dict[str, Any]:
        said = await super().record_replica_metadata()
        return {name: value for name, value in said.items() if name != "cost"}


def served(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, encoder: type) -> tuple[float, float]:
    """Returns the slow encoder's share of the patches, and the p95 of requests in seconds."""
    monkeypatch.setattr(app, "Encoder", encoder)
    sections: dict[str, Any] = {
        "encoder": ARGS["encoder"] | {"replicas": 3},
        "graphs": {"token_budgets": [64, 256]},
        "router": ARGS["router"] | {"coalesce": False},
        "auth": {},
    }
    images = [jpeg(side, side) for side in (128, 256, 512)]

    def call(seed: int) -> list[float]:
        """Returns the seconds of each request."""
        random, taken = Random(seed), []
        with Client(cluster.http) as client:
            for _ in range(REQUESTS):
                began = monotonic()
                client.encode(random.choices(images, k=random.randint(1, 4)))
                taken.append(monotonic() - began)
        return taken

    with running("unequal", **sections):
        with ThreadPoolExecutor(CALLERS) as pool:
            taken = sorted(
                second for seconds in pool.map(call, range(CALLERS)) for second in seconds
            )
        patches = series(cluster, "encoder_patches_total")
        slower = series(cluster, "encoder_measured_seconds", of="slower")
    (slow,) = (replica for replica, times in slower.items() if times == SLOWER)
    return patches[slow] / sum(patches.values()), taken[int(0.95 * len(taken))]


def series(cluster: Cluster, name: str, **labels: str) -> dict[str, float]:
    """The series by replica."""
    found: dict[str, float] = {}
    page = httpx.get(f"{cluster.http}/metrics").text
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                found[sample.labels["replica"]] = sample.value
    return found


def build(args: dict[str, Any]) -> serve.Application:
    with pytest.MonkeyPatch.context() as patched:  # this task's process is used again
        patched.setattr(app, "Encoder", Unequal)
        return app.build(args)


def refusal(client: Client, image: bytes) -> str:
    try:
        client.encode([image])
    except ServiceError as error:
        return str(error)
    return ""


def test_pools_are_one_fleet(cluster: Cluster) -> None:
    url = cluster.http
    given = {key: value for key, value in ARGS["encoder"].items() if key != "replicas"}
    pools = [{"name": "fast"}, {"name": "slow", "graphs": {"token_budgets": [4, 16, 64]}}]
    sections = {
        "graphs": {"token_budgets": [4, 16, 64, 256]},
        "router": {"coalesce": False},
        "auth": {},
    }
    application = {
        "name": "pools",
        "route_prefix": "/",
        "import_path": "tests.serve.test_unequal:build",
        "args": ARGS
        | sections
        | {"encoder": given | {"pools": pools}, "limits": {"max_items": 2 * SAME}},
        "deployments": [],
    }
    large, images = jpeg(512, 512), [jpeg(side, side) for side in (128, 256)]
    try:
        deploy({"applications": [application]})
        with Client(url) as client:
            *rows, last = (one.numpy() for one in client.encode([*images, large], "float32"))
            for _ in range(10):
                found = client.encode(images * SAME, "float32")
                assert all((found[at].numpy() == rows[at % 2]).all() for at in range(2 * SAME))
        small = dict(zip(images, rows, strict=True))
        seen = httpx.get(f"{url}/v1/status").json()
        patches = {one["pool"]: one["patches"] for one in seen["replicas"]}
        print(patches)
        assert patches["fast"] > 1.5 * patches["slow"] > 0
        # The slow pool has no graph for the large image, and did not get it.
        assert seen["paths"]["default"]["misses"] == {}
        (slow,) = series(cluster, "encoder_router_patches_total", pool="slow")
        assert list(series(cluster, "encoder_patches_total", pool="slow")) == [slow]

        before = set(actors())
        application["deployments"] = [{"name": "Encoder-slow", "num_replicas": 2}]
        with load(url, small):
            deploy({"applications": [application]})
            within(60, lambda: ready_replicas(url) == 3)
        assert before < set(actors()), "nothing restarts"

        (fast,) = series(cluster, "encoder_patches_total", pool="fast")
        actor = ray.get_actor(f"SERVE_REPLICA::pools#Encoder-fast#{fast}", namespace="serve")
        with load(url, small), Client(url, retries=0) as client:
            ray.kill(actor)
            refused = "the item has 256 tokens and the encoders that are ready take 64"
            within(20, lambda: refused in refusal(client, large))
            within(60, lambda: ready_replicas(url) == 3)
            assert (client.encode([large], "float32")[0].numpy() == last).all()
    finally:
        serve.delete("pools")


def test_a_slow_encoder_gets_less_by_seconds_and_nobody_waits_for_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_patches = served(cluster, monkeypatch, Unmeasured)
    by_seconds = served(cluster, monkeypatch, Unequal)
    for name, (share, p95) in (("patches", by_patches), ("seconds", by_seconds)):
        print(f"by {name}: {share:.0%} of the patches on the slow encoder, p95 {p95:.2f} s")
    assert by_seconds[0] < 0.75 * by_patches[0]
    assert by_seconds[1] < by_patches[1]
