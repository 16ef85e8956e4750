"""The whole service on three nodes, two of which are lost. Run by test_several_nodes.py."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Sequence
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
from tests.chaos.callers import TOLERANCE, Callers, Phase
from tests.chaos.faults import replicas
from tests.chaos.sources import Rows, Source, from_outside, within_ray
from tests.images import jpeg
from tests.serve.nodes import Node, node_of, nodes
from tests.serve.tiny import GRPC_PORT
from tests.serve.wide import wide
from tests.waiting import within

APP = "encoder"
IMAGES = [jpeg(side, side) for side in (64, 96, 128, 160, 224, 256)]
"""Rows of 0.2, 0.4, 0.8, 1.2, 2.4 and 3.1 MB."""
GRPC = f"grpc://127.0.0.1:{GRPC_PORT}"
"""All ingresses listen there. On one machine, Linux chooses one of them."""
PAUSE_SECONDS = 0.25
"""Of a caller between two requests, on average: without, callers would slow down the start of what
replaces the dead."""
KNOWN: dict[bytes, Rows] = {}
"""The rows of each image."""


def options(folder: Path, count: int = 3) -> ServiceOptions:
    """`count`: of encoders, and of ingresses. An encoder takes two CPUs. A node has room for one,
    or for two after a loss."""
    return parse(
        {
            "model": wide(folder).model_dump(),
            "encoder": {
                "replicas": count,
                "num_gpus": 0,
                "num_cpus": 2,
                "device": "cpu",
                "health_check_period_seconds": 1,
                "drain_timeout_seconds": 2,
            },
            "graphs": {"token_budgets": [16, 64]},
            "router": {"num_cpus": 0.1},
            "ingress": {"num_cpus": 0.1, "replicas": count, "grpc_port": GRPC_PORT},
        }
    )


def main() -> None:
    # Ray declares a hanging node dead after five checks: after 25 s instead of a minute.
    os.environ.update(RAY_health_check_period_ms="1000", RAY_health_check_timeout_ms="4000")
    with (
        tempfile.TemporaryDirectory() as folder,
        nodes({"num_cpus": 3}, {"num_cpus": 5}, {"num_cpus": 5}) as found,
    ):
        made = options(Path(folder))
        serve.run(build(made.model_dump()), name=APP, route_prefix="/")
        for deployment in ("Encoder", "Ingress"):
            assert {node_of(one) for one in replicas(deployment)} == {one.id for one in found}
        within(60, lambda: all(ready(one) == 3 for one in found))
        encode_near(found)
        by_id(found)
        (router,) = replicas("Router")
        last, first = sorted(found[1:], key=lambda node: node.id != node_of(router))
        left = [found[0], last]
        lose(first, signal.SIGKILL, left, 3, [*outside(*left), partial(within_ray, made)])
        assert {node_of(one) for one in replicas("Encoder")} == {node.id for node in left}
        lose(last, signal.SIGSTOP, left[:1], 1, outside(*left[:1]))
    print("all nodes did their part")


def ready(node: Node) -> int:
    """How many encoders the ingress behind a node's proxy would give work to."""
    try:
        # Without `verify`, httpx would load certificates for each call: 25 ms.
        answer = httpx.get(f"{node.http}/readyz", verify=False)
        return int(answer.json().get("ready_replicas", 0))
    except (httpx.TransportError, ValueError):  # it does not listen yet, or knows no ingress
        return 0


def counted(node: Node, what: str, where: str) -> float:
    """Bytes sent between all ingresses and encoders."""
    return sum(
        value
        for (name, labels), value in scrape(node.http).items()
        if name == "encoder_router_bytes_total" and {what, where} <= set(dict(labels).values())
    )


def outside(*found: Node) -> list[Source]:
    """Callers of the proxies of these nodes, two each."""
    return [partial(from_outside, node.http) for node in found for _ in range(2)]


def encode_near(found: Sequence[Node]) -> None:
    """Items that come one at a time stay on their proxy's node."""
    for node in found:
        for url in (node.http, GRPC):
            with Client(url) as client:
                KNOWN.update({one: client.encode([one], "float32")[0].numpy() for one in IMAGES})
    assert counted(found[0], "items", "remote") == 0
    assert counted(found[0], "items", "local") == 6 * sum(map(len, KNOWN))
    assert counted(found[0], "rows", "local") == 6 * sum(rows.nbytes for rows in KNOWN.values())


def by_id(found: Sequence[Node]) -> None:
    """Embeddings that a request left on all nodes can be fetched through any proxy."""
    with Client(found[0].http) as client:
        kept = client.encode(list(KNOWN), "float32", reference=True)
    assert len({one.reference.split(".")[0] for one in kept}) == 3
    assert counted(found[0], "items", "remote") > 0
    for node in found:
        for url in (node.http, GRPC):
            with Client(url) as client:
                for one, rows in zip(kept, KNOWN.values(), strict=True):
                    assert np.abs(client.fetch(one.reference).numpy() - rows).max() < TOLERANCE
    assert counted(found[0], "rows", "remote") > 0


def lose(
    victim: Node,
    number: signal.Signals,
    left: list[Node],
    encoders: int,
    sources: list[Source],
) -> None:
    """Sends a signal to all processes of a node under load. No request through the others may fail.

    `encoders`: how many the nodes in `left` have room for.
    """
    callers = Callers(sources, KNOWN, PAUSE_SECONDS)
    callers.start()
    within(60, lambda: len(callers.phase.latencies_seconds) > 20)
    phases = [callers.next_phase()]
    started = time.monotonic()
    victim.signal(number)
    within(120, lambda: victim.id not in {one["NodeID"] for one in ray.nodes() if one["Alive"]})
    seen = time.monotonic() - started
    within(200, lambda: all(ready(one) == encoders for one in left))
    over = time.monotonic() - started
    print(f"{number.name}: Ray saw it after {seen:.0f} s, over after {over:.0f} s")
    phases.append(callers.next_phase())
    within(60, lambda: len(callers.phase.latencies_seconds) > 20)
    callers.stop()
    nothing_lost([*phases, callers.phase])
    victim.signal(signal.SIGKILL)


def nothing_lost(phases: Sequence[Phase]) -> None:
    """Fails for a request that failed or got wrong rows."""
    for phase in phases:
        taken = phase.latencies_seconds
        print(f"{len(taken)} answers, {max(taken):.1f} s at most")
        assert not phase.wrong, phase.wrong[:3]
        assert not phase.failed, (phase.failed, phase.messages)


if __name__ == "__main__":
    main()
