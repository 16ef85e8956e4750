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
PLOTTED_UNEQUAL = ("largest_first", "by patches", "all known")
GOAL = 1.1
"""p99 relative to a router that knows everything, with replicas of different speed."""


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
        nargs="+",
        default=[1],
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
    rows_by_speed = {
        slower: [
            measure(name, replicas, slower, options)
            for replicas in options.replicas
            for name in ROWS
        ]
        for slower in options.slower
    }
    rows = [row for own in rows_by_speed.values() for row in own]
    write_json(options.json, rows)
    if options.plot:
        plot(rows, options.plot)
    for slower, own in rows_by_speed.items():
        console.print(table(own, slower, options))
    return 0


def measure(name: str, replicas: int, slower: float, options: argparse.Namespace) -> dict[str, Any]:
    """One policy under steady traffic and, separately, under a burst."""
    policy, known = ROWS[name]
    requests = max(options.requests, BURST_REQUESTS * replicas)
    fleet: Any = {"seed": SEED, "cost": H200_8B, "slower": (1, slower)}
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
        "slower": slower,
        "policy": name,
        "p50_ms": p50 * 1e3,
        "p99_ms": p99 * 1e3,
        "imbalance": flow.imbalance,
        "makespan_ms": rush.makespan_seconds * 1e3,
        "makespan_ratio": rush.makespan_seconds * sum(speeds) / work_seconds,
    }


def table(rows: Sequence[dict[str, Any]], slower: float, options: argparse.Namespace) -> Table:
    slow = f", speeds {slower:g}:1" if slower != 1 else ""
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
    """Writes a PNG, over the number of replicas: one plot per figure if all replicas are equally
    fast, else p99 relative to `all known`, one plot per ratio of speeds."""
    from matplotlib.figure import Figure  # optional, and slow to import

    equal = all(row["slower"] == 1 for row in rows)
    plots = curves(rows) if equal else relative_curves(rows)
    figure = Figure(figsize=(min(11.0, 5.5 * len(plots)), 3.6), layout="constrained")
    every_axes = figure.subplots(1, len(plots), squeeze=False, sharey=not equal)[0]
    for axes, (title, lines) in zip(every_axes, plots.items(), strict=True):
        for policy, points in lines.items():
            axes.plot(points.keys(), points.values(), marker="o", markersize=3, label=policy)
        axes.set_xscale("log")
        axes.set_xlabel("replicas")
        axes.set_title(title)
        if equal:
            axes.set_ylim(bottom=0)
        else:
            axes.axhline(GOAL, color="gray", linestyle="dashed", label=f"goal: {GOAL:g}")
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter("{x:g}")
            fleets = sorted({row["replicas"] for row in rows})
            axes.set_xticks(fleets, map(str, fleets))
            axes.set_xticks([], minor=True)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=110, format="png")


Curves = dict[str, dict[str, dict[int, float]]]
"""Title -> policy -> replicas -> figure."""


def curves(rows: Sequence[dict[str, Any]]) -> Curves:
    return {
        label: {
            policy: {row["replicas"]: row[name] for row in rows if row["policy"] == policy}
            for policy in ROWS
        }
        for name, label in PLOTTED.items()
    }


def relative_curves(rows: Sequence[dict[str, Any]]) -> Curves:
    p99 = {(row["slower"], row["policy"], row["replicas"]): row["p99_ms"] for row in rows}
    fleets = list(dict.fromkeys(row["replicas"] for row in rows))
    return {
        f"p99 / all known, speeds {slower:g}:1": {
            policy: {
                fleet: p99[slower, policy, fleet] / p99[slower, "all known", fleet]
                for fleet in fleets
            }
            for policy in PLOTTED_UNEQUAL
        }
        for slower in dict.fromkeys(row["slower"] for row in rows)
    }
