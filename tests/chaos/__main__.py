"""`make chaos`: a real service under load while its parts die. Exits with 1 if a promise is broken.

Promises: every answer is right and in order; no request fails but for those whose own connection or
ingress was killed; afterwards nothing is outstanding, and the object store is as it was.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from encoder_service.bench.cluster import cluster, logical_cpus, service
from encoder_service.bench.scrape import scrape
from encoder_service.client import Client
from encoder_service.config import ServiceOptions, parse
from tests.chaos.callers import Callers, Phase
from tests.chaos.faults import ENCODERS, FAULTS
from tests.images import jpeg
from tests.serve.object_store import used

SIDES = (48, 64, 96, 120, 160, 200, 256)
RECOVERY_SECONDS = 180.0
"""The longest that a recovery may take."""
MAY_LOSE_CONNECTIONS = {"an ingress is killed", "the proxy is killed"}
"""Whoever talks to a process that is killed cannot be answered by it."""
STORE_BYTES = 400_000_000


def main() -> int:
    """Runs every fault, prints a table, judges."""
    parser = argparse.ArgumentParser("chaos")
    parser.add_argument("--seconds", type=float, default=10, help="of load after each recovery")
    parser.add_argument("--only", nargs="*", choices=list(FAULTS), help="some of the faults")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = Console()
    made = hardy()
    rows: list[dict[str, Any]] = []
    with cluster(logical_cpus(made), object_store_bytes=STORE_BYTES) as where, service(made):
        images = [jpeg(side, SIDES[-1 - place]) for place, side in enumerate(SIDES)]
        with Client(where.http) as client:
            known = {image: client.encode([image], "float32")[0].numpy() for image in images}
        before_bytes = used().bytes
        callers = Callers(where, known)
        callers.start()
        for name in options.only or FAULTS:
            console.print(f"{name} ...")
            callers.next_phase()
            started = time.monotonic()
            seconds = until(FAULTS[name](where), started)
            time.sleep(options.seconds)
            rows.append(row(name, seconds, callers.next_phase()))
        callers.stop()
        left = rest(lambda: outstanding(where.http))
        kept = rest(lambda: max(0, used().bytes - before_bytes))
    console.print(table(rows))
    console.print(f"outstanding patches at the end: {left:g}; bytes left in the store: {kept:g}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    broken = [one["fault"] for one in rows if one["wrong"] or one["broken"]]
    broken += ["patches left"] * bool(left) + ["store not empty"] * bool(kept)
    console.print(f"[red]broken: {', '.join(broken)}" if broken else "every promise held")
    return 1 if broken else 0


def hardy() -> ServiceOptions:
    """The tiny service with two ingresses and two routers, whose health is asked for often."""
    return parse(
        {
            "model": {"id": "qwen3vl-tiny", "load_format": "dummy", "dtype": "float32"},
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


def outstanding(url: str) -> float:
    """Patches that routers hold, as /metrics say."""
    series = "encoder_router_outstanding_patches"
    return sum(value for (name, _), value in scrape(url).items() if name == series)


def row(name: str, seconds: float | None, phase: Phase) -> dict[str, Any]:
    """One fault's figures."""
    allowed = {"connection"} if name in MAY_LOSE_CONNECTIONS else set[str]()
    lost = sum(count for kind, count in phase.failed.items() if kind not in allowed)
    p50, p99 = np.percentile(phase.latencies_seconds or [np.nan], [50, 99])
    return {
        "fault": name,
        "recovery_seconds": seconds,
        "right": len(phase.latencies_seconds),
        "failed": dict(phase.failed),
        "wrong": phase.wrong,
        "p50_seconds": float(p50),
        "p99_seconds": float(p99),
        "broken": seconds is None or not phase.latencies_seconds or lost > 0,
    }


def table(rows: list[dict[str, Any]]) -> Table:
    """The figures, for people."""
    shown = Table(title="requests that ended while it lasted", title_justify="left")
    shown.add_column("fault", no_wrap=True)
    for name in ("right", "p50 s", "p99 s", "recovered after s", "failed", "wrong"):
        shown.add_column(name, justify="right")
    for one in rows:
        seconds = one["recovery_seconds"]
        failed = ", ".join(f"{count} {kind}" for kind, count in one["failed"].items())
        shown.add_row(
            one["fault"],
            str(one["right"]),
            f"{one['p50_seconds']:.2f}",
            f"{one['p99_seconds']:.2f}",
            "never" if seconds is None else f"{seconds:.1f}",
            failed or "0",
            str(len(one["wrong"])),
        )
    return shown


if __name__ == "__main__":
    sys.exit(main())
