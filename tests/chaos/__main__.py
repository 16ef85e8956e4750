"""`make chaos`: a real service under load while its parts die. Exits with 1 if a promise is broken.

Promises: every answer is right and in order; no request fails but for those whose own connection or
ingress was killed; afterwards nothing is outstanding, the object store is as it was, and row memory
is empty.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from actors.options import GraphOptions, ImagesKwargs
from encoder_service.bench.cluster import cluster, logical_cpus, service
from encoder_service.bench.load import scrape
from encoder_service.client import Client
from encoder_service.config import ServiceOptions, parse
from tests.chaos.callers import GPU_TOLERANCE, TOLERANCE, Callers, Phase, known_files
from tests.chaos.faults import ENCODERS, FAULTS, GPU_FAULTS
from tests.chaos.sources import sources
from tests.serve.object_store import used
from tests.serve.wide import WIDTH, wide

RECOVERY_SECONDS = 180.0
"""The longest that a recovery may take."""
FRONT_DOOR = {"connection", "http_error", "internal"}
LOST_IDS = {"fetch: unavailable", "fetch: not_found", "fetch: deadline_exceeded"}
MAY_FAIL = {
    "an encoder is killed": LOST_IDS,
    "a GPU context is lost": LOST_IDS,
    "an ingress is killed": FRONT_DOOR,
    "a node is killed": FRONT_DOOR | LOST_IDS,
    "the proxy is killed": {"connection"},
    "the router is killed": {"connection"},
    "decoding stalls": {"overloaded", "Overloaded"},
}
"""Whoever talks to a process that is killed cannot be answered by it: Serve's proxy says 500 in its
place, over gRPC INTERNAL ("internal"; an error of ours would be "internal_error"). Refusals are no
answers that were lost. The ids that a lost encoder kept are answered with 503, with 404 once
another encoder has its place, or with 504 if rows of over a megabyte were being read."""
OUTSTANDING, ROW_MEMORY = "encoder_router_outstanding_patches", "encoder_row_memory_bytes"
FOLDER = TemporaryDirectory()  # for the model; removed when the process ends
STORE_BYTES, GPU_STORE_BYTES = 400_000_000, 4_000_000_000


def main() -> int:
    """Runs every fault, prints a table, judges."""
    parser = argparse.ArgumentParser("chaos")
    parser.add_argument(
        "--seconds", type=float, default=5, help="of load before each fault and after"
    )
    every = {**FAULTS, **GPU_FAULTS}
    parser.add_argument("--only", nargs="*", choices=list(every), help="some of the faults")
    parser.add_argument(
        "--gpus", type=int, default=0, help="on which the three encoders run a tower at full size"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = Console(width=150)
    made = on_gpus(options.gpus) if options.gpus else hardy()
    faults = options.only or (every if options.gpus else FAULTS)
    store_bytes = GPU_STORE_BYTES if options.gpus else STORE_BYTES
    rows: list[dict[str, Any]] = []
    with cluster(logical_cpus(made), object_store_bytes=store_bytes) as where, service(made, where):
        with Client(where.http) as client:
            known = known_files(client)
        before_bytes = used().bytes
        tolerance = GPU_TOLERANCE if options.gpus else TOLERANCE
        callers = Callers(sources(where, made), known, tolerance=tolerance)
        callers.start()
        for name in faults:
            console.print(f"{name} ...")
            callers.next_phase()
            time.sleep(options.seconds)
            before = callers.next_phase()
            started = time.monotonic()
            seconds = until(every[name](where), started)
            during = callers.next_phase()
            time.sleep(options.seconds)
            rows.append(row(name, seconds, before, during, callers.next_phase()))
        callers.stop()
        left = rest(lambda: total(where.http, OUTSTANDING))
        lent = rest(lambda: total(where.http, ROW_MEMORY))
        kept = rest(lambda: max(0, used().bytes - before_bytes))
    console.print(table(rows))
    console.print(
        f"outstanding patches at the end: {left:g}; bytes left in the store: {kept:g}, in row "
        f"memory: {lent:g}"
    )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    broken = [one["fault"] for one in rows if one["wrong"] or one["broken"]]
    broken += ["patches left"] * bool(left) + ["store not empty"] * bool(kept)
    broken += ["row memory not empty"] * bool(lent)
    console.print(f"[red]broken: {', '.join(broken)}" if broken else "every promise held")
    return 1 if broken else 0


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
            "cache": {"max_bytes": 0},
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
