"""A report of the engine's bench as a picture: bars a workload and mode, a mark at each floor."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from actors.errors import ConfigError
from encoder_service.bench.engine.report import ModelReport, Report
from encoder_service.bench.published import published

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INCHES = (11.0, 4.2)
"""Width and height of one model's part."""

BARS = 0.8
"""Width of a workload's bars together; workloads are 1 apart."""


def require_matplotlib() -> None:
    """Raises ConfigError. Called before anything is measured."""
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'encoder-service[bench]'")


def plot(report: Report, path: Path) -> None:
    """Writes a PNG, one part a model."""
    from matplotlib.figure import Figure  # optional, and slow to import

    count = len(report.models)
    figure = Figure(figsize=(INCHES[0], INCHES[1] * count), layout="constrained")
    parts = figure.subplots(count, 1, squeeze=False)
    for axes, model in zip(parts[:, 0], report.models, strict=True):
        draw(axes, model, report.device)
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    figure.supxlabel(f"{report.device}, {versions}, {report.date}", fontsize="small")
    figure.savefig(path, dpi=110, format="png")


def draw(axes: Axes, model: ModelReport, device: str) -> None:
    """One model: workloads side by side, times from a millisecond to a hundred in one scale."""
    modes = list(dict.fromkeys(f.mode for each in model.workloads for f in each.figures))
    width = BARS / len(modes)
    for place, mode in enumerate(modes):
        lefts = [index - BARS / 2 + width * place for index in range(len(model.workloads))]
        times = [each.figures[place].times.median_ms for each in model.workloads]
        bars = axes.bar(lefts, times, width, align="edge", label=mode)
        axes.bar_label(bars, fmt="%.3g", fontsize="x-small", padding=1)
    marks = {
        "floor": [each.floor_ms for each in model.workloads],
        "vLLM 0.26 (not of this run)": [
            line.vllm_ms if line else None
            for line in (published(model.model, each.name, device) for each in model.workloads)
        ],
    }
    for (label, values), color in zip(marks.items(), ("black", "crimson"), strict=True):
        known = [(index, value) for index, value in enumerate(values) if value is not None]
        if known:
            places = [index for index, _ in known]
            axes.hlines(
                [value for _, value in known],
                [place - BARS / 2 for place in places],
                [place + BARS / 2 for place in places],
                colors=color,
                linestyles="dashed",
                label=label,
            )
    axes.set_yscale("log")
    axes.margins(y=0.12)
    axes.set_xticks(range(len(model.workloads)), [each.name for each in model.workloads])
    axes.set_ylabel("ms, median")
    axes.set_title(model.model)
    axes.legend(fontsize="small")
