"""Pools of two accelerators, each on a node of its own, one of which is lost and comes back. Run by
test_several_nodes.py.

The nodes have no GPU. They declare the resource `accelerator_type:L4` or `accelerator_type:H200`,
which Ray itself declares on a node with such a GPU and which `accelerator_type` asks for.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import ray
import torch
from ray import serve

from actors.models.load import load
from encoder_service.app import build
from encoder_service.bench.load import scrape
from encoder_service.client import Client
from encoder_service.config import parse
from tests.chaos.callers import Callers
from tests.chaos.faults import replicas
from tests.chaos.sources import Rows
from tests.checkpoints import write_qwen3vl
from tests.images import jpeg
from tests.parity.conftest import Pair
from tests.parity.table import TOLERANCE
from tests.serve.checkpoint.test_parity import expected
from tests.serve.nodes import Node, node_of, nodes
from tests.serve.three_nodes import PAUSE_SECONDS, nothing_lost, outside, ready
from tests.serve.tiny import GRPC_PORT
from tests.waiting import within

BUDGETS = {"l4": (16, 64), "h200": (16, 64, 256)}
COUNTS = {"l4": 2, "h200": 1}
SMALL, LARGE = [jpeg(64, 64), jpeg(200, 200)], jpeg(400, 400)
"""4, 36 and 144 tokens: only the H200s have a budget for the last."""


def main() -> None:
    # Ray declares a lost node dead after five checks: after 5 s instead of 15 s.
    os.environ.update(RAY_health_check_period_ms="1000")
    labels: list[dict[str, Any]] = [{f"accelerator_type:{name.upper()}": 1} for name in BUDGETS]
    with (
        tempfile.TemporaryDirectory() as folder,
        nodes(*({"num_cpus": 4, "resources": one} for one in ({}, *labels))) as (head, l4, h200),
    ):
        pair = checkpoint(Path(folder))
        serve.run(build(args(folder)), name="encoder", route_prefix="/")
        within(60, lambda: all(ready(one) == 3 for one in (head, l4, h200)))
        placed({"l4": l4, "h200": h200})
        known = right_rows(pair, {"l4": l4, "h200": h200})
        own_budgets(head)
        lose(l4, [head, h200], known)
    print("all nodes did their part")


def checkpoint(folder: Path) -> Pair:
    """Written to the folder, with transformers' own model of it."""
    reference = write_qwen3vl(folder)
    return Pair(reference, load(parse(args(folder)).model, torch.device("cpu")), folder)


def args(folder: str | Path) -> dict[str, Any]:
    pools = [
        {
            "name": name,
            "replicas": COUNTS[name],
            "accelerator_type": name.upper(),
            "graphs": {"token_budgets": budgets},
        }
        for name, budgets in BUDGETS.items()
    ]
    return {
        "model": {"id": str(folder), "dtype": "float32"},
        "encoder": {
            "num_gpus": 0,
            "device": "cpu",
            "health_check_period_seconds": 1,
            "drain_timeout_seconds": 2,
            "pools": pools,
        },
        "graphs": {"max_frames_per_batch": 0},  # one graph for each budget
        "router": {"num_cpus": 0.1},
        "ingress": {"replicas": 3, "num_cpus": 0.1, "grpc_port": GRPC_PORT},
    }


def placed(where: dict[str, Node]) -> None:
    """Encoders run on the nodes with their pool's accelerator only, although all have room."""
    for pool, node in where.items():
        found = [node_of(one) for one in replicas(f"Encoder-{pool}")]
        assert found == [node.id] * COUNTS[pool], (pool, found)
        assert pools(node) == COUNTS


def status(node: Node) -> Any:
    return httpx.get(f"{node.http}/v1/status", verify=False).raise_for_status().json()


def pools(node: Node) -> dict[str, int]:
    """How many encoders of each pool are ready, as /v1/status says."""
    shown = [one["pool"] for one in status(node)["replicas"]]
    return {name: shown.count(name) for name in shown}


def counted(node: Node, series: str) -> dict[str, float]:
    """The sum of a series over each pool."""
    found = dict.fromkeys(BUDGETS, 0.0)
    for (name, labels), value in scrape(node.http).items():
        if name == series:
            found[dict(labels)["pool"]] += value
    return found


def right_rows(pair: Pair, where: dict[str, Node]) -> dict[bytes, Rows]:
    """Each pool encodes what its node's proxy gets, except for what is too large for it. Returns
    the rows of all images, which are those of transformers in either pool."""
    images = [*SMALL, LARGE]
    right = {image: expected(pair, [image])[0].numpy() for image in images}

    def encoded_by(pool: str, node: Node, image: bytes) -> bool:
        before = counted(node, "encoder_patches_total")
        with Client(node.http) as client:
            (found,) = client.encode([image], "float32")
        after = counted(node, "encoder_patches_total")
        assert found.source == "graph"
        assert np.abs(found.numpy() - right[image]).max() < TOLERANCE
        (worked,) = (name for name in after if after[name] > before[name])
        assert image != LARGE or worked == "h200"
        return worked == pool

    for pool, node in where.items():
        for image in images:  # a busy encoder's item goes to another pool
            within(60, partial(encoded_by, "h200" if image == LARGE else pool, node, image))
    return right


def own_budgets(node: Node) -> None:
    captured = counted(node, "encoder_captured_graphs")
    assert captured == {name: COUNTS[name] * len(BUDGETS[name]) for name in BUDGETS}, captured


def lose(victim: Node, left: Sequence[Node], known: dict[bytes, Rows]) -> None:
    """The only node of a pool is killed and started again, under load. No request through the other
    nodes may fail."""
    callers = Callers(outside(*left), known, PAUSE_SECONDS)
    callers.start()
    within(60, lambda: len(callers.phase.latencies_seconds) > 20)
    phases = [callers.next_phase()]
    started = time.monotonic()
    victim.signal(signal.SIGKILL)
    within(60, lambda: victim.id not in {one["NodeID"] for one in ray.nodes() if one["Alive"]})
    within(60, lambda: all(pools(one) == {"h200": COUNTS["h200"]} for one in left))
    lost = time.monotonic() - started
    within(60, lambda: len(callers.phase.latencies_seconds) > 20)
    within(20, lambda: status(left[0])["missing"]["Encoder-l4"] == 1)
    phases.append(callers.next_phase())
    back = victim.again()
    within(120, lambda: all(ready(one) == 3 for one in (*left, back)))
    print(f"lost after {lost:.0f} s, back after {time.monotonic() - started:.0f} s")
    placed({"l4": back})
    phases.append(callers.next_phase())
    worked = counted(back, "encoder_patches_total")["l4"]
    within(60, lambda: counted(back, "encoder_patches_total")["l4"] > worked)
    callers.stop()
    nothing_lost([*phases, callers.phase])


if __name__ == "__main__":
    main()
