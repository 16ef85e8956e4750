"""`encoder-service simulate`: the balancing policies over simulated fleets of any size."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import HORIZONTALS
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from encoder_service.bench.engine.tables import require_matplotlib
from encoder_service.commands import above_zero, add_command, add_json, positive, write_json
from router.options import Policy
from router.policy.balance import POLICIES
from router.simulate.simulation import Simulation
from router.simulate.traffic import H200_8B, burst, steady

BURST_REQUESTS = 4
"""Per replica, all at once."""
PLOTTED = {"p50_ms": "p50, ms", "p99_ms": "p99, ms", "makespan_ratio": "burst over the best"}


@dataclass(frozen=True, slots=True)
class SimulatedPolicy:
    replicas: int
    policy: str
    p50_ms: float
    p99_ms: float
    imbalance: float
    """Busiest replica over the mean, in seconds of work."""
    makespan_ms: float
    """Of a burst on an idle fleet."""
    makespan_ratio: float
    """Makespan over the mean work per replica; 1 is the optimum."""
    replans: int


def add(subcommands: Any) -> None:
    parser = add_command(
        subcommands,
        "simulate",
        run,
        "compare the balancing policies over simulated fleets, without a cluster",
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
        "--requests", type=positive, default=4000, metavar="N", help="at least, per fleet"
    )
    parser.add_argument(
        "--load", type=above_zero, default=0.7, metavar="PART", help="part of the fleet's capacity"
    )
    parser.add_argument(
        "--routers",
        type=positive,
        default=2,
        metavar="N",
        help="a router learns of the others' requests only from what replicas report",
    )
    parser.add_argument(
        "--reports-alone",
        action="store_true",
        help="replicas report their load once a second, not with every answer",
    )
    parser.add_argument(
        "--deaths", type=int, default=0, metavar="N", help="replicas that die during the run"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the traffic")
    add_json(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="plot them (needs [bench])")


def run(options: argparse.Namespace, console: Console) -> int:
    if options.plot:
        require_matplotlib()
    fleets = ", ".join(map(str, options.replicas))
    # There is no progress bar if the output is a pipe.
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
    write_json(options.json, [asdict(row) for row in rows])
    if options.plot:
        plot(rows, options.plot)
    console.print(table(rows, options))
    return 0


def measure(policy: Policy, replicas: int, options: argparse.Namespace) -> SimulatedPolicy:
    """One policy under steady traffic and, separately, under a burst."""
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
    return SimulatedPolicy(
        replicas=replicas,
        policy=policy,
        p50_ms=float(p50),
        p99_ms=float(p99),
        imbalance=flow.imbalance,
        makespan_ms=rush.makespan_seconds * 1e3,
        makespan_ratio=rush.imbalance,
        replans=flow.replans,
    )


def table(rows: Sequence[SimulatedPolicy], options: argparse.Namespace) -> Table:
    shown = Table(
        title=f"load {options.load:g}, {options.routers} routers, {options.deaths} deaths; "
        f"a burst of {BURST_REQUESTS} requests per replica",
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


def plot(rows: Sequence[SimulatedPolicy], path: Path) -> None:
    """Writes a PNG with one plot per figure, over the number of replicas."""
    from matplotlib.figure import Figure  # optional, and slow to import

    figure = Figure(figsize=(11.0, 3.6), layout="constrained")
    for axes, (name, label) in zip(figure.subplots(1, len(PLOTTED)), PLOTTED.items(), strict=True):
        for policy in dict.fromkeys(row.policy for row in rows):
            own = [row for row in rows if row.policy == policy]
            fleets = [row.replicas for row in own]
            values = [getattr(row, name) for row in own]
            axes.plot(fleets, values, marker="o", markersize=3, label=policy)
        axes.set_xscale("log")
        axes.set_xlabel("replicas")
        axes.set_title(label)
        axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=110, format="png")
