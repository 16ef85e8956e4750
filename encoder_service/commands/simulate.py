"""`encoder-service simulate`: compares the balancing policies on simulated fleets of any size."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import HORIZONTALS
from rich.console import Console
from rich.table import Table

from encoder_service.commands import (
    above_zero,
    add_command,
    add_json,
    add_plot,
    positive,
    write_json,
)
from router.options import Policy
from router.policy.balance import POLICIES
from router.simulate import H200_8B, Known, Simulation, burst, steady

SEED = 1
BURST_REQUESTS = 4
"""Requests per replica, all sent at once."""
COLUMNS = {
    "p50_ms": ("p50 ms", "{:.1f}"),
    "p99_ms": ("p99 ms", "{:.1f}"),
    "imbalance": ("imbalance", "{:.2f}"),
    "makespan_ms": ("burst ms", "{:.0f}"),
    "makespan_ratio": ("of optimum", "{:.2f}"),
}
"""imbalance: seconds of work of the busiest replica over the mean. makespan: how long an idle fleet
takes for a burst. makespan_ratio: that over the time at which all replicas would finish together; 1
is the optimum."""
ROWS: dict[str, tuple[Policy, Known]] = {
    **{policy: (policy, "seconds") for policy in POLICIES},
    "by patches": ("largest_first", "patches"),
    "all known": ("largest_first", "everything"),
}
PLOTTED = {"p50_ms": "p50, ms", "p99_ms": "p99, ms", "makespan_ratio": "burst / optimum"}


def add(subcommands: Any) -> None:
    parser = add_command(
        subcommands,
        "simulate",
        run,
        "compare the balancing policies on simulated fleets, without a cluster",
    )
    parser.add_argument(
        "--replicas",
        type=positive,
        nargs="+",
        default=[4, 8, 64, 1000],
        metavar="N",
        help="fleet sizes",
    )
    parser.add_argument(
        "--requests", type=positive, default=4000, metavar="N", help="minimum requests per fleet"
    )
    parser.add_argument(
        "--load",
        type=above_zero,
        default=0.7,
        metavar="FRACTION",
        help="fraction of the fleet's capacity",
    )
    parser.add_argument(
        "--routers",
        type=positive,
        default=2,
        metavar="N",
        help="routers; each learns of the others' requests only from the replicas' reports",
    )
    parser.add_argument(
        "--slower",
        type=above_zero,
        default=1,
        metavar="K",
        help="every second replica takes K times as long; routers know it, except `by patches`",
    )
    parser.add_argument(
        "--reports-alone",
        action="store_true",
        help="replicas report their load once a second instead of with every response",
    )
    add_json(parser)
    add_plot(parser)


def run(options: argparse.Namespace, console: Console) -> int:
    fleets = ", ".join(map(str, options.replicas))
    Console(stderr=True, soft_wrap=True).print(
        f"simulating {len(ROWS)} policies on fleets of {fleets} replicas ..."
    )
    rows = [measure(name, replicas, options) for replicas in options.replicas for name in ROWS]
    write_json(options.json, rows)
    if options.plot:
        plot(rows, options.plot)
    console.print(table(rows, options))
    return 0


def measure(name: str, replicas: int, options: argparse.Namespace) -> dict[str, Any]:
    """One policy under steady traffic and, separately, under a burst."""
    policy, known = ROWS[name]
    requests = max(options.requests, BURST_REQUESTS * replicas)
    fleet: Any = {"seed": SEED, "cost": H200_8B, "slower": (1, options.slower)}
    traffic = steady(replicas, requests, options.load, routers=options.routers, **fleet)
    traffic = replace(traffic, reports_alone=options.reports_alone, known=known)
    flow = Simulation(traffic, POLICIES[policy], SEED).run()
    once = replace(burst(replicas, BURST_REQUESTS * replicas, **fleet), known=known)
    rush = Simulation(once, POLICIES[policy], SEED).run()
    speeds = [1 / each for each in islice(cycle(once.slower), replicas)]
    work_seconds = sum(busy * speed for busy, speed in zip(rush.busy_seconds, speeds, strict=True))
    p50, p99 = np.percentile(flow.latencies_seconds, [50, 99]).tolist()
    return {
        "replicas": replicas,
        "policy": name,
        "p50_ms": p50 * 1e3,
        "p99_ms": p99 * 1e3,
        "imbalance": flow.imbalance,
        "makespan_ms": rush.makespan_seconds * 1e3,
        "makespan_ratio": rush.makespan_seconds * sum(speeds) / work_seconds,
    }


def table(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> Table:
    slow = f", speeds {options.slower:g}:1" if options.slower != 1 else ""
    shown = Table(
        title=f"load {options.load:g}, {options.routers} routers{slow}; "
        f"a burst of {BURST_REQUESTS} requests per replica",
        title_justify="left",
        box=HORIZONTALS,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    shown.add_column("replicas", justify="right")
    shown.add_column("policy", no_wrap=True)
    for name, _ in COLUMNS.values():
        shown.add_column(name, justify="right")
    last = list(ROWS)[-1]
    for row in rows:
        figures = (pattern.format(row[key]) for key, (_, pattern) in COLUMNS.items())
        shown.add_row(
            str(row["replicas"]), row["policy"], *figures, end_section=row["policy"] == last
        )
    return shown


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Writes a PNG with one plot per figure, over the number of replicas."""
    from matplotlib.figure import Figure  # optional, and slow to import

    figure = Figure(figsize=(11.0, 3.6), layout="constrained")
    for axes, (name, label) in zip(figure.subplots(1, len(PLOTTED)), PLOTTED.items(), strict=True):
        for policy in dict.fromkeys(row["policy"] for row in rows):
            own = [row for row in rows if row["policy"] == policy]
            fleets = [row["replicas"] for row in own]
            values = [row[name] for row in own]
            axes.plot(fleets, values, marker="o", markersize=3, label=policy)
        axes.set_xscale("log")
        axes.set_xlabel("replicas")
        axes.set_title(label)
        axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=110, format="png")
