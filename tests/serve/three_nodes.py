"""The whole service on three nodes, one of which dies under load. Run by test_several_nodes.py."""

from __future__ import annotations

import signal
import tempfile
import time
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import ray
from ray import serve

from encoder_service.app import build
from encoder_service.bench.load import scrape
from encoder_service.client import Client
from encoder_service.config import ServiceOptions, parse
from tests.chaos.callers import TOLERANCE, Callers
from tests.chaos.faults import replicas
from tests.chaos.sources import Rows, from_outside, within_ray
from tests.images import jpeg
from tests.serve.nodes import Node, node_of, nodes
from tests.serve.stand_in import within
from tests.serve.wide import wide

APP = "encoder"
IMAGES = [jpeg(side, side) for side in (64, 96, 128, 160, 224, 256)]
"""Rows of 0.2, 0.4, 0.8, 1.2, 2.4 and 3.1 MB."""


def options(folder: Path) -> ServiceOptions:
    """An encoder takes two CPUs: a node has room for one, or after a loss for two."""
    return parse(
        {
            "model": wide(folder).model_dump(),
            "encoder": {
                "replicas": 3,
                "num_gpus": 0,
                "num_cpus": 2,
                "device": "cpu",
                "health_check_period_seconds": 1,
            },
            "graphs": {"token_budgets": [16, 64]},
            "router": {"num_cpus": 0.1},
            "ingress": {"num_cpus": 0.1, "replicas": 3},
        }
    )


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        nodes({"num_cpus": 3}, {"num_cpus": 5}, {"num_cpus": 5}) as found,
    ):
        made = options(Path(folder))
        serve.run(build(made.model_dump()), name=APP, route_prefix="/")
        for deployment in ("Encoder", "Ingress"):
            assert {node_of(one) for one in replicas(deployment)} == {one.id for one in found}
        within(60, lambda: all(ready(one) == 3 for one in found))
        known = encode_near(found)
        by_id(found, known)
        lose_a_node(found, made, known)
    print("all nodes did their part")


def ready(node: Node) -> int:
    """Encoders that the ingress behind a node's proxy would give work to."""
    return int(httpx.get(f"{node.http}/readyz").json().get("ready_replicas", 0))


def counted(node: Node, what: str, where: str) -> float:
    """Bytes between all ingresses and encoders."""
    return sum(
        value
        for (name, labels), value in scrape(node.http).items()
        if name == "encoder_router_bytes_total" and {what, where} <= set(dict(labels).values())
    )


def encode_near(found: list[Node]) -> dict[bytes, Rows]:
    """Items that come one at a time stay on their proxy's node. Gives the rows of each."""
    for node in found:
        for url in (node.http, node.grpc):
            with Client(url) as client:
                known = {one: client.encode([one], "float32")[0].numpy() for one in IMAGES}
    assert counted(found[0], "items", "remote") == 0
    assert counted(found[0], "items", "local") == 6 * sum(map(len, known))
    assert counted(found[0], "rows", "local") == 6 * sum(rows.nbytes for rows in known.values())
    return known


def by_id(found: list[Node], known: dict[bytes, Rows]) -> None:
    """What one proxy's request left on all nodes is fetched through the others."""
    with Client(found[0].http) as client:
        kept = client.encode(list(known), "float32", reference=True)
    assert len({one.reference.split(".")[0] for one in kept}) == 3
    assert counted(found[0], "items", "remote") > 0
    for node in found:
        for url in (node.http, node.grpc):
            with Client(url) as client:
                for one, rows in zip(kept, known.values(), strict=True):
                    assert np.abs(client.fetch(one.reference).numpy() - rows).max() < TOLERANCE
    assert counted(found[0], "rows", "remote") > 0


def lose_a_node(found: list[Node], made: ServiceOptions, known: dict[bytes, Rows]) -> None:
    """All processes of a node end at once, under load through the other nodes."""
    (router,) = replicas("Router")
    victim = next(node for node in found[1:] if node.id != node_of(router))
    others = [node for node in found if node is not victim]
    urls = [url for node in others for url in (node.http, node.grpc)]
    sources = [*(partial(from_outside, url) for url in urls), partial(within_ray, made)]
    callers = Callers(sources, known)
    callers.start()
    within(60, lambda: len(callers.phase.latencies_seconds) > 20)
    before = callers.next_phase()
    started = time.monotonic()
    victim.signal(signal.SIGKILL)
    within(120, lambda: victim.id not in alive())
    print(f"Ray saw it after {time.monotonic() - started:.1f} s")
    within(120, lambda: len(replicas("Encoder")) == 3 and all(ready(one) == 3 for one in others))
    print(f"recovered after {time.monotonic() - started:.1f} s")
    during = callers.next_phase()
    within(60, lambda: len(callers.phase.latencies_seconds) > 20)
    callers.stop()
    for phase in (before, during, callers.phase):
        print(len(phase.latencies_seconds), max(phase.latencies_seconds), phase.failed)
        assert not phase.wrong, phase.wrong[:3]
        assert not phase.failed, (phase.failed, phase.messages)
    assert {node_of(one) for one in replicas("Encoder")} == {node.id for node in others}


def alive() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


if __name__ == "__main__":
    main()
