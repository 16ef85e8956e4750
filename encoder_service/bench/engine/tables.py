"""The report of the engine's benchmark as tables and as a plot. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from actors.errors import ConfigError
from encoder_service.bench.engine.report import (
    SOURCE,
    EngineReport,
    ModeFigures,
    ModelReport,
    Profile,
    WorkloadReport,
    published,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_KERNELS = 25
"""Rows of a profile; the other kernels share one row."""
NOTHING = "-"
INCHES = (11.0, 4.2)
"""Width and height of one model's plot."""
BARS = 0.8
"""Width of a workload's bars together; workloads are 1 apart."""


def tables(report: EngineReport) -> Iterator[Table]:
    """Profiles and budgets first, the figures of each model last."""
    for model in report.models:
        for profile in model.profiles:
            yield kernels(model.model, profile)
        if model.budget_times:
            yield every_budget(model)
    for model in report.models:
        yield figures(model, report.device)


def figures(model: ModelReport, device: str) -> Table:
    known = [published(model.model, each.name, device) for each in model.workloads]
    shown = plain(f"{model.model}, {device}, errors against {model.reference} in float32")
    if any(known):
        shown.caption = f"* {SOURCE}. Goal: this project's."
        shown.caption_justify = "left"
    shown.add_column("workload", max_width=20, overflow="fold")
    shown.add_column("mode", no_wrap=True)
    right(shown, "median ms", "p99 ms", "host ms", "of floor", "padding", "error", "floor ms")
    if any(known):
        right(shown, "vLLM* ms", "goal ms")
    for workload, others in zip(model.workloads, known, strict=True):
        static = [milliseconds(value) for value in (workload.floor_ms, *(others or ()))]
        for index, figure in enumerate(workload.figures):
            first, last = index == 0, index == len(workload.figures) - 1
            shown.add_row(
                workload.name if first else "",
                *row(figure, workload),
                *(static if first else []),
                end_section=last,
            )
    return shown


def row(figure: ModeFigures, workload: WorkloadReport) -> list[str]:
    floor = workload.floor_ms
    return [
        figure.mode,
        milliseconds(figure.times.median_ms),
        milliseconds(figure.times.p99_ms),
        milliseconds(figure.host_ms),
        f"{floor / figure.times.median_ms:.0%}" if floor else NOTHING,
        f"{figure.padding_ratio:.1%}" if figure.budgets else NOTHING,
        f"{figure.error:.1e}",
    ]


def every_budget(model: ModelReport) -> Table:
    shown = plain(f"{model.model}: one image of 400 patches in every budget")
    right(shown, "budget", "median ms", "p99 ms", "error")
    for each in model.budget_times:
        times = milliseconds(each.times.median_ms), milliseconds(each.times.p99_ms)
        shown.add_row(str(each.budget), *times, f"{each.error:.1e}")
    return shown


def kernels(model: str, profile: Profile) -> Table:
    shown = plain(f"{model}, {profile.workload}, {profile.mode}: kernels of one call")
    shown.add_column("kernel", no_wrap=True)
    right(shown, "calls", "total us", "us per call", "share")
    for kernel in profile.kernels[:MOST_KERNELS]:
        shown.add_row(
            kernel.name,
            f"{kernel.calls:g}",
            f"{kernel.total_us:.1f}",
            f"{kernel.total_us / kernel.calls:.1f}",
            f"{kernel.share:.1%}",
        )
    rest = profile.kernels[MOST_KERNELS:]
    if rest:
        calls, spent = sum(each.calls for each in rest), sum(each.total_us for each in rest)
        share = sum(each.share for each in rest)
        shown.add_row(f"{len(rest)} others", f"{calls:g}", f"{spent:.1f}", "", f"{share:.1%}")
    total = sum(each.total_us for each in profile.kernels)
    shown.add_row("all", "", f"{total:.1f}", "", "")
    return shown


def plain(title: str) -> Table:
    """Narrow enough that a row is one line of a log."""
    return Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        min_width=len(title) + 2,
    )


def right(shown: Table, *names: str) -> None:
    for name in names:
        shown.add_column(name, justify="right", no_wrap=True)


def milliseconds(value: float | None) -> str:
    """Three significant figures."""
    if value is None:
        return NOTHING
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def require_matplotlib() -> None:
    """Raises ConfigError. Called before anything is measured."""
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'encoder-service[bench]'")


def plot(report: EngineReport, path: Path) -> None:
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
    """Bars by workload and mode on a log scale, a dashed mark at each floor and vLLM figure."""
    modes = list(dict.fromkeys(f.mode for each in model.workloads for f in each.figures))
    width = BARS / len(modes)
    for place, mode in enumerate(modes):
        lefts = [index - BARS / 2 + width * place for index in range(len(model.workloads))]
        times = [each.figures[place].times.median_ms for each in model.workloads]
        bars = axes.bar(lefts, times, width, align="edge", label=mode)
        axes.bar_label(bars, fmt="%.3g", fontsize="x-small", padding=1)
    known = [published(model.model, each.name, device) for each in model.workloads]
    mark(axes, [each.floor_ms for each in model.workloads], "floor", "black")
    vllm = [others[0] if others else None for others in known]
    mark(axes, vllm, "vLLM 0.26 (not of this run)", "crimson")
    axes.set_yscale("log")
    axes.margins(y=0.12)
    axes.set_xticks(range(len(model.workloads)), [each.name for each in model.workloads])
    axes.set_ylabel("ms, median")
    axes.set_title(model.model)
    axes.legend(fontsize="small")


def mark(axes: Axes, values: Sequence[float | None], label: str, color: str) -> None:
    known = {place: value for place, value in enumerate(values) if value is not None}
    if known:
        lefts = [place - BARS / 2 for place in known]
        rights = [place + BARS / 2 for place in known]
        heights = list(known.values())
        axes.hlines(heights, lefts, rights, colors=color, linestyles="dashed", label=label)
