"""A report of the engine's bench as tables for people. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.table import Table

from encoder_service.bench.engine.report import Figure, ModelReport, Profile, Report, WorkloadReport
from encoder_service.bench.published import SOURCE, published

KERNELS = 25
"""Rows of a profile; the rest is one row."""

NOTHING = "-"


def tables(report: Report) -> Iterator[Table]:
    """Details first, the figures of each model last."""
    for model in report.models:
        for profile in model.profiles:
            yield kernels(model.model, profile)
        if model.budget_times:
            yield every_budget(model)
    for model in report.models:
        yield figures(model, report.device)


def figures(model: ModelReport, device: str) -> Table:
    """A row a workload and mode."""
    known = [published(model.model, each.name, device) for each in model.workloads]
    shown = plain(f"{model.model}, {device}, errors against {model.reference} in float32")
    if any(known):
        shown.caption = f"* {SOURCE}. Goal: this project's."
        shown.caption_justify = "left"
    shown.add_column("workload", max_width=20, overflow="fold")
    shown.add_column("mode", no_wrap=True)
    for name in ("median ms", "p99 ms", "host ms", "of floor", "padding", "error"):
        shown.add_column(name, justify="right", no_wrap=True)
    for name in ("floor ms", "vLLM* ms", "goal ms") if any(known) else ("floor ms",):
        shown.add_column(name, justify="right", no_wrap=True)
    for workload, line in zip(model.workloads, known, strict=True):
        static = [milliseconds(workload.floor_ms)]
        static += [milliseconds(line.vllm_ms), milliseconds(line.goal_ms)] if line else []
        for index, figure in enumerate(workload.figures):
            first = index == 0
            shown.add_row(
                workload.name if first else "",
                *row(figure, workload),
                *(static if first else []),
                end_section=index == len(workload.figures) - 1,
            )
    return shown


def row(figure: Figure, workload: WorkloadReport) -> list[str]:
    """From "mode" to "error"."""
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
    """What the bounds of a graph cost an item that needs none of them."""
    shown = plain(f"{model.model}: one image of 400 patches in every budget")
    for name in ("budget", "median ms", "p99 ms", "error"):
        shown.add_column(name, justify="right")
    for each in model.budget_times:
        times = each.times
        shown.add_row(
            str(each.budget),
            milliseconds(times.median_ms),
            milliseconds(times.p99_ms),
            f"{each.error:.1e}",
        )
    return shown


def kernels(model: str, profile: Profile) -> Table:
    """Where the time of one call goes."""
    shown = plain(f"{model}, {profile.workload}, {profile.mode}: kernels of one call")
    shown.add_column("kernel", no_wrap=True)
    for name in ("calls", "total us", "us a call", "share"):
        shown.add_column(name, justify="right", no_wrap=True)
    for kernel in profile.kernels[:KERNELS]:
        shown.add_row(
            kernel.name,
            f"{kernel.calls:g}",
            f"{kernel.total_us:.1f}",
            f"{kernel.total_us / kernel.calls:.1f}",
            f"{kernel.share:.1%}",
        )
    rest = profile.kernels[KERNELS:]
    if rest:
        calls, spent = sum(each.calls for each in rest), sum(each.total_us for each in rest)
        share = sum(each.share for each in rest)
        shown.add_row(f"{len(rest)} others", f"{calls:g}", f"{spent:.1f}", "", f"{share:.1%}")
    total = sum(each.total_us for each in profile.kernels)
    shown.add_row("all", "", f"{total:.1f}", "", "")
    return shown


def plain(title: str) -> Table:
    """Narrow: a row is one line of a log."""
    return Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        min_width=len(title) + 2,
    )


def milliseconds(value: float | None) -> str:
    """Three figures."""
    if value is None:
        return NOTHING
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"
