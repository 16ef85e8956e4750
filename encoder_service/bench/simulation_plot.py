"""Simulated fleets as a picture: what each policy costs, by the number of replicas."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

FIGURES = {"p50_ms": "p50, ms", "p99_ms": "p99, ms", "makespan_ratio": "burst over the best"}


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Writes a PNG, a part for each figure. `rows` as simulate.Row has them."""
    from matplotlib.figure import Figure  # optional, and slow to import

    figure = Figure(figsize=(11.0, 3.6), layout="constrained")
    for axes, (key, label) in zip(figure.subplots(1, len(FIGURES)), FIGURES.items(), strict=True):
        for policy in dict.fromkeys(row["policy"] for row in rows):
            own = [row for row in rows if row["policy"] == policy]
            fleets = [row["replicas"] for row in own]
            axes.plot(fleets, [row[key] for row in own], marker="o", markersize=3, label=policy)
        axes.set_xscale("log")
        axes.set_xlabel("replicas")
        axes.set_title(label)
        axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=110, format="png")
