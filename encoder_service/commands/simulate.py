"""`encoder-service simulate`: the balancing policies over fleets that nobody has at hand.

Runs router/simulate over its traffic scenarios and prints; needs no cluster.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import HORIZONTALS
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from encoder_service.bench.engine_plot import require_matplotlib
from encoder_service.bench.simulation_plot import plot
from encoder_service.commands.numbers import above_zero, positive
from router.options import Policy
from router.policy.balance import POLICIES
from router.simulate.simulation import Simulation
from router.simulate.traffic import H200_8B, burst, steady

BURST_REQUESTS = 4
"""For each replica, all at once."""


@dataclass(frozen=True, slots=True)
class Row:
    """One policy over one fleet."""

    replicas: int
    policy: str
    p50_ms: float
    p99_ms: float
    imbalance: float
    """Busiest replica over the mean, in seconds of work."""
    makespan_ms: float
    """Of a burst on an idle fleet."""
    makespan_ratio: float
    """Over the mean work of a replica: 1 is the best that there can be."""
    replans: int


def add(subcommands: Any) -> None:
    """The subcommand."""
    parser = subcommands.add_parser("simulate", help="balancing policies over simulated fleets")
    parser.add_argument("--replicas", type=positive, nargs="+", default=[4, 8, 64, 1000])
    parser.add_argument("--requests", type=positive, default=4000, help="at least (%(default)s)")
    parser.add_argument("--load", type=above_zero, default=0.7, help="of capacity (%(default)s)")
    parser.add_argument(
        "--routers", type=positive, default=2, help="each with stale reports of others"
    )
    parser.add_argument(
        "--reports-alone",
        action="store_true",
        help="replicas tell their load once a second, not with every answer",
    )
    parser.add_argument("--deaths", type=int, default=0, help="replicas that die on the way")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="and a picture of them (PNG)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    """Prints a table."""
    if options.plot:
        require_matplotlib()
    fleets = ", ".join(map(str, options.replicas))
    # Into a pipe there is no progress bar.
    Console(stderr=True, soft_wrap=True).print(
        f"simulating {len(POLICIES)} policies over fleets of {fleets} replicas ..."
    )
    rows = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("simulating", total=len(options.replicas) * len(POLICIES))
        for replicas in options.replicas:
            for policy in POLICIES:
                rows.append(measure(policy, replicas, options))
                progress.advance(task)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    if options.plot:
        plot([asdict(row) for row in rows], options.plot)
    console.print(table(rows, options))
    return 0


def measure(policy: Policy, replicas: int, options: argparse.Namespace) -> Row:
    """One policy through steady traffic, and through a burst of its own."""
    seed, plan = options.seed, POLICIES[policy]
    traffic = steady(
        replicas,
        max(options.requests, BURST_REQUESTS * replicas),
        options.load,
        routers=options.routers,
        deaths=options.deaths,
        seed=seed,
        cost=H200_8B,
        answers_tell=not options.reports_alone,
    )
    flow = Simulation(traffic, plan, seed).run()
    once = burst(replicas, BURST_REQUESTS * replicas, seed=seed, cost=H200_8B)
    rush = Simulation(once, plan, seed).run()
    p50, p99 = np.percentile(flow.latencies_seconds, [50, 99]) * 1e3
    return Row(
        replicas=replicas,
        policy=policy,
        p50_ms=float(p50),
        p99_ms=float(p99),
        imbalance=flow.imbalance,
        makespan_ms=rush.makespan_seconds * 1e3,
        makespan_ratio=rush.imbalance,
        replans=flow.replans,
    )


def table(rows: list[Row], options: argparse.Namespace) -> Table:
    """The figures side by side, for people."""
    shown = Table(
        title=f"load {options.load:g}, {options.routers} routers, {options.deaths} deaths; "
        f"a burst of {BURST_REQUESTS} requests a replica",
        title_justify="left",
        box=HORIZONTALS,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    shown.add_column("replicas", justify="right")
    shown.add_column("policy", no_wrap=True)
    for name in ("p50 ms", "p99 ms", "imbalance", "burst ms", "of best", "replans"):
        shown.add_column(name, justify="right")
    last = list(POLICIES)[-1]
    for row in rows:
        figures = (
            f"{row.p50_ms:.1f}",
            f"{row.p99_ms:.1f}",
            f"{row.imbalance:.2f}",
            f"{row.makespan_ms:.0f}",
            f"{row.makespan_ratio:.2f}",
            str(row.replans),
        )
        shown.add_row(str(row.replicas), row.policy, *figures, end_section=row.policy == last)
    return shown
