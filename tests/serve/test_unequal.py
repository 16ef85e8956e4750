"""Three encoders on CPUs, one of them slowed down: by seconds it gets less than by patches."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from time import monotonic, sleep
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from torch import Tensor

from actors.encoder import Encoder
from actors.engine.device import Device
from actors.options import ActorOptions
from encoder_service import Client, app
from tests.images import jpeg
from tests.serve.conftest import Cluster
from tests.serve.tiny import ARGS, running

pytestmark = [pytest.mark.extended, pytest.mark.timeout(600)]

SLOWER = 4
TOKEN_SECONDS = 2e-4
"""Of the encoders that are not slowed down; the real work on top of it is a fraction."""
CALLERS, REQUESTS = 4, 100


class Unequal(Encoder):
    """The first takes SLOWER times as long as the others."""

    def __init__(self, options: ActorOptions) -> None:
        slower = 1 if serve.get_replica_context().rank.rank else SLOWER

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
        super().__init__(options)
        self.series.measured_seconds.labels("slower").set(slower)


class Unmeasured(Unequal):
    async def record_replica_metadata(self) -> dict[str, Any]:
        said = await super().record_replica_metadata()
        return {name: value for name, value in said.items() if name != "cost"}


def served(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, encoder: type) -> tuple[float, float]:
    """The slow encoder's share of the patches, and the p99 of requests in seconds."""
    monkeypatch.setattr(app, "Encoder", encoder)
    sections: dict[str, Any] = {
        "encoder": ARGS["encoder"] | {"replicas": 3},
        "graphs": {"token_budgets": [64, 256]},
        "router": ARGS["router"] | {"coalesce": False},
        "auth": {},
    }
    images = [jpeg(side, side) for side in (128, 256, 512)]

    def call(seed: int) -> list[float]:
        """Seconds of each request."""
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
    return patches[slow] / sum(patches.values()), taken[int(0.99 * len(taken))]


def series(cluster: Cluster, name: str, **labels: str) -> dict[str, float]:
    """By replica."""
    found: dict[str, float] = {}
    page = httpx.get(f"{cluster.http}/metrics").text
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                found[sample.labels["replica"]] = sample.value
    return found


def test_a_slow_encoder_gets_less_by_seconds_and_nobody_waits_for_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_patches = served(cluster, monkeypatch, Unmeasured)
    by_seconds = served(cluster, monkeypatch, Unequal)
    for name, (share, p99) in (("patches", by_patches), ("seconds", by_seconds)):
        print(f"by {name}: {share:.0%} of the patches on the slow encoder, p99 {p99:.2f} s")
    assert by_seconds[0] < 0.75 * by_patches[0]
    assert by_seconds[1] < by_patches[1]
