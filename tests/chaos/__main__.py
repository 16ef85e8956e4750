"""`make chaos`: a real service under load while its parts die. Exits with 1 if a promise is broken.

Promises: every request is answered, right and in order; none fails but for those whose own
connection, ingress or id was lost; afterwards every replica is back, nothing is outstanding, the
object stores are as they were, and row memory is empty.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from actors.options import GraphOptions, ImagesKwargs
from encoder_service.bench.cluster import Cluster, cluster, logical_cpus, service
from encoder_service.bench.load import scrape
from encoder_service.client import Client
from encoder_service.config import ServiceOptions, parse
from tests.chaos.callers import GPU_TOLERANCE, IMAGES, TOLERANCE, Callers, Phase, known_files
from tests.chaos.faults import ENCODERS, FAULTS, GPU_FAULTS, Recovered, replicas
from tests.chaos.nodes import NODE_KILLED, Traffic, TwoNodes, two_nodes
from tests.chaos.sources import Source, sources
from tests.serve import three_nodes
from tests.serve.nodes import node_of
from tests.serve.object_store import used
from tests.serve.wide import WIDTH, wide
from tests.waiting import within

RECOVERY_SECONDS = 180.0
"""The longest that a recovery may take."""
FETCHES = {"fetch: http_error", "fetch: internal", "fetch: unavailable"}
FRONT_DOOR = {"connection", "http_error", "internal"} | FETCHES
LOST_IDS = {"fetch: unavailable", "fetch: not_found", "fetch: deadline_exceeded"}
MAY_FAIL = {
    "an encoder is killed": LOST_IDS,
    "an encoder hangs": LOST_IDS,
    "a GPU context is lost": LOST_IDS,
    "an ingress is killed": FRONT_DOOR,
    NODE_KILLED: FRONT_DOOR | LOST_IDS,
    "the proxy is killed": {"connection"},
    "the router is killed": {"connection"},
    "decoding stalls": {"overloaded", "Overloaded"},
}
"""Whoever talks to a process that is killed cannot be answered by it: Serve's proxy says 500 in its
place, over gRPC INTERNAL ("internal"; an error of ours would be "internal_error"). Refusals are no
answers that were lost. The ids that a lost encoder kept are answered with 503, with 404 once
another encoder has its place, or with 504 if rows of over a megabyte were being read."""
OUTSTANDING, ROW_MEMORY = "encoder_router_outstanding_patches", "encoder_row_memory_bytes"
NO_CACHE = {"max_bytes": 0}
FOLDER = TemporaryDirectory()  # for the model; removed when the process ends
STORE_BYTES, GPU_STORE_BYTES = 400_000_000, 4_000_000_000
PAUSE_SECONDS = 0.3
"""On two nodes, of a caller between two requests, on average: without, callers would slow down the
start of what replaces the dead."""
LEAST_SHARE = 0.25
"""Of the bytes of items on two nodes, over TCP as well as over sockets."""


@dataclass(frozen=True)
class Place:
    """A running service and its load."""

    where: Cluster
    faults: Mapping[str, Callable[[], Recovered]]
    sources: Sequence[Source]
    images: Sequence[bytes]
    pause_seconds: float = 0
    tolerance: float = TOLERANCE
    nodes: TwoNodes | None = None


def main() -> int:
    """Runs every fault, prints a table, judges."""
    parser = argparse.ArgumentParser("chaos")
    parser.add_argument(
        "--seconds", type=float, default=5, help="of load before each fault and after"
    )
    every = [*FAULTS, *GPU_FAULTS, NODE_KILLED]
    parser.add_argument("--only", nargs="*", choices=every, help="some of the faults")
    machine = parser.add_mutually_exclusive_group()
    machine.add_argument(
        "--gpus", type=int, default=0, help="on which the three encoders run a tower at full size"
    )
    machine.add_argument(
        "--nodes", type=int, choices=(1, 2), default=1, help="of Ray, over which the service runs"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    here = [*FAULTS, *(GPU_FAULTS if options.gpus else ()), *[NODE_KILLED] * (options.nodes > 1)]
    if missing := set(options.only or ()) - set(here):
        parser.error(f"--only: {', '.join(missing)} needs --gpus or --nodes 2")
    console = Console(width=150)
    phases: list[tuple[str, float | None, Phase, Phase, Phase]] = []
    never = ""
    with both_nodes() if options.nodes == 2 else one_node(options.gpus) as place:
        url = place.where.http
        with Client(url) as client:
            known = known_files(client, place.images)
        before_bytes, before_replicas = used().bytes, placed()
        traffic = Traffic(url)
        callers = Callers(place.sources, known, place.pause_seconds, place.tolerance)
        callers.start()
        for name in options.only or place.faults:
            console.print(f"{name} ...")
            time.sleep(options.seconds)
            before = callers.next_phase()
            traffic.look()
            started = time.monotonic()
            seconds = until(place.faults[name](), started)
            during = callers.next_phase()
            time.sleep(options.seconds)
            phases.append((name, seconds, before, during, callers.next_phase()))
        try:
            callers.stop()
        except RuntimeError as error:
            never = str(error)
        phases[-1][-1].add(callers.phase)
        traffic.look()
        left = {
            "patches outstanding": rest(lambda: total(url, OUTSTANDING)),
            "bytes in the object stores": rest(lambda: max(0, used().bytes - before_bytes)),
            "bytes in row memory": rest(lambda: total(url, ROW_MEMORY)),
            "replicas missing": rest(lambda: before_replicas.total() - len(replicas_of_all())),
        }
        after_replicas = placed()
    rows = [row(*each) for each in phases]
    for each in rows:
        if place.nodes:
            each["wrong"] += place.nodes.spared(each["fault"], each["messages"])
    console.print(table(rows))
    console.print(f"at the end: {', '.join(f'{much:,.0f} {one}' for one, much in left.items())}")
    console.print(
        f"replicas on each node: {numbers(before_replicas)}; at the end: {numbers(after_replicas)}"
    )
    console.print(f"between routers and encoders: {traffic}")
    right, failed = sum(sum(each["right"]) for each in rows), sum(map(failures, rows))
    wrong = sum(len(each["wrong"]) for each in rows)
    console.print(
        f"{right} requests answered right, {failed} failed, {wrong} wrong; "
        f"{never or 'none without an answer'}"
    )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    broken = [one["fault"] for one in rows if one["wrong"] or one["broken"]]
    broken += [name for name, amount in left.items() if amount] + [never] * bool(never)
    share = traffic.remote_share("items")
    # Of few faults it may be lower: while a node is away, everything stays on the other one.
    if place.nodes and not options.only and not LEAST_SHARE < share < 1 - LEAST_SHARE:
        broken.append("too little over TCP, or over sockets")
    console.print(f"[red]broken: {', '.join(broken)}" if broken else "every promise held")
    return 1 if broken else 0


@contextmanager
def one_node(gpus: int) -> Iterator[Place]:
    """On one node."""
    made = on_gpus(gpus) if gpus else hardy()
    faults = {**FAULTS, **GPU_FAULTS} if gpus else FAULTS
    with (
        cluster(logical_cpus(made), GPU_STORE_BYTES if gpus else STORE_BYTES) as where,
        service(made, where),
    ):
        named = {name: partial(fault, where) for name, fault in faults.items()}
        tolerance = GPU_TOLERANCE if gpus else TOLERANCE
        yield Place(where, named, sources(where, made), IMAGES, tolerance=tolerance)


@contextmanager
def both_nodes() -> Iterator[Place]:
    """On two nodes, each with an ingress."""
    made = parse(three_nodes.options(Path(FOLDER.name)).model_dump() | {"cache": NO_CACHE})
    with two_nodes() as pair, service(made, pair.where):
        within(RECOVERY_SECONDS, pair.ready)
        faults = {name: partial(pair.strike, name) for name in pair.named}
        yield Place(
            pair.where,
            faults,
            pair.sources(made),
            three_nodes.IMAGES,
            PAUSE_SECONDS,
            nodes=pair,
        )


def failures(row: Mapping[str, Any]) -> int:
    """How many requests failed as a whole."""
    return sum(count for kind, count in row["failed"].items() if not kind.startswith("item: "))


def placed() -> Counter[tuple[str, str]]:
    """How many replicas of each deployment each node has."""
    return Counter((deployment, node_of(replica)) for deployment, replica in replicas_of_all())


def replicas_of_all() -> list[tuple[str, str]]:
    return [(one, each) for one in ("Encoder", "Ingress", "Router") for each in replicas(one)]


def numbers(found: Counter[tuple[str, str]]) -> str:
    """Such as "Encoder 2 + 1": how many replicas each node has."""
    sorts = sorted({deployment for deployment, _ in found})
    return ", ".join(
        f"{sort} {' + '.join(str(count) for (one, _), count in found.items() if one == sort)}"
        for sort in sorts
    )


def hardy() -> ServiceOptions:
    """The tiny service with two ingresses and two routers, whose health is asked for often. Its
    rows are so wide that those of most images are lent."""
    return parse(
        {
            "model": wide(Path(FOLDER.name), 2 * WIDTH).model_dump(),
            "encoder": {
                "replicas": ENCODERS,
                "num_gpus": 0,
                "num_cpus": 0.1,
                "device": "cpu",
                "health_check_period_seconds": 1,
            },
            "router": {"num_cpus": 0.1, "replicas": 2},
            "ingress": {"num_cpus": 0.1, "replicas": 2},
            "cache": NO_CACHE,
        }
    )


def on_gpus(gpus: int) -> ServiceOptions:
    """The same around a tower at full size, with as many encoders to a GPU as needed."""
    options = hardy()
    shared = {
        "num_gpus": 1 / -(-ENCODERS // gpus),
        "device": "cuda",
        "num_cpus": 1,
    }
    model = options.model.model_copy(
        update={
            "id": "qwen3vl-2b",
            "dtype": "bfloat16",
            # As the tiny model's: images that take long to decode are not to fill the store.
            "images_kwargs": ImagesKwargs(max_pixels=2**20),
        }
    )
    graphs = GraphOptions(token_budgets=(64, 128, 256, 512, 1024), max_frames_per_batch=0)
    encoder = options.encoder.model_copy(update=shared)
    return options.model_copy(update={"model": model, "graphs": graphs, "encoder": encoder})


def until(recovered: Callable[[], bool], started: float) -> float | None:
    """Seconds to recovery; None: not in time."""
    while not recovered():
        if time.monotonic() - started > RECOVERY_SECONDS:
            return None
        time.sleep(0.2)
    return time.monotonic() - started


def rest(amount: Callable[[], float]) -> float:
    """What is left when it does not fall any more, at most half a minute from now."""
    end = time.monotonic() + 30
    while (left := amount()) and time.monotonic() < end:
        time.sleep(0.5)
    return left


def total(url: str, series: str) -> float:
    """The sum over all processes, as /metrics says."""
    return sum(value for (name, _), value in scrape(url).items() if name == series)


def row(name: str, seconds: float | None, *phases: Phase) -> dict[str, Any]:
    """One fault's figures: before it, until the recovery, and after."""
    allowed = MAY_FAIL.get(name, set())
    failed = sum((phase.failed for phase in phases), Counter[str]())
    lost = sum(count for kind, count in failed.items() if kind not in allowed)
    shown = {
        when: dict(zip(("p50", "p99", "longest"), quantiles(phase), strict=True))
        for when, phase in zip(("before", "during", "after"), phases, strict=True)
    }
    right = [len(phase.latencies_seconds) for phase in phases]
    return {
        "fault": name,
        "recovery_seconds": seconds,
        "right": right,
        "failed": dict(failed),
        "messages": sorted(set().union(*(phase.messages for phase in phases))),
        "wrong": [one for phase in phases for one in phase.wrong],
        "latency_seconds": shown,
        "broken": seconds is None or not right[-1] or lost > 0,
    }


def quantiles(phase: Phase) -> list[float]:
    """Seconds of the requests that were answered right: half, 99 of 100, all took less."""
    return [float(each) for each in np.percentile(phase.latencies_seconds or [0], [50, 99, 100])]


def table(rows: list[dict[str, Any]]) -> Table:
    """The figures, for people."""
    shown = Table(title="seconds before / until recovered / after", title_justify="left")
    shown.add_column("fault")
    for name in ("answered right", "p50", "p99", "longest", "recovered after", "failed", "wrong"):
        shown.add_column(name, justify="right")
    for one in rows:
        seconds = one["recovery_seconds"]
        latencies = one["latency_seconds"].values()
        shown.add_row(
            one["fault"],
            " / ".join(map(str, one["right"])),
            *(
                " / ".join(f"{each[name]:.2f}" for each in latencies)
                for name in ("p50", "p99", "longest")
            ),
            "never" if seconds is None else f"{seconds:.1f}",
            ", ".join(f"{count} {kind}" for kind, count in one["failed"].items()) or "0",
            str(len(one["wrong"])),
        )
    return shown


if __name__ == "__main__":
    sys.exit(main())
