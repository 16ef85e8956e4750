"""Workloads, modes and results of the engine's benchmark. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from rich import box
from rich.table import Table

from actors.types import Size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Mode = Literal["transformers", "eager", "exact", "budget", "fast", "compile", "reference", "fp8"]
MODES: tuple[Mode, ...] = get_args(Mode)
DEFAULT_MODES = MODES[:4]
MODE_HELP = (
    "transformers: the tower of transformers; eager: ours without graphs; exact: ours with a graph "
    "of exactly the workload's tokens; budget: the service's graphs and packing; fast, compile, "
    "reference: budget with this graphs.blocks (compile needs a C++ compiler); fp8: budget with "
    "graphs.precision fp8, needs --precision-file"
)

TOLERANCE = 2e-2
"""Maximum relative error against float32. bf16 alone causes about 1.3e-2 on full towers."""
FP8_TOLERANCE = 1e-1
"""The same for FP8, whose accuracy `calibrate` has to judge."""
NOTHING = "-"
INCHES = (11.0, 4.2)
"""Width and height of one model's plot."""
BARS = 0.8
"""Total width of a workload's bars; workloads are 1 apart."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Images of these sizes, or sounds of this many seconds, that are encoded together."""

    name: str
    sizes: tuple[Size, ...] = ()
    seconds: tuple[float, ...] = ()
    kept: float = 1.0
    """The share of merge blocks of each image that pruning leaves."""


MIXED = (
    Size(1920, 1080),
    Size(1280, 720),
    Size(1024, 1024),
    Size(1024, 768),
    Size(800, 600),
    Size(720, 720),
    *[Size(600, 400)] * 2,
    *[Size(512, 512)] * 3,
    *[Size(448, 448)] * 3,
    Size(400, 300),
    *[Size(336, 336)] * 2,
    Size(300, 500),
    *[Size(224, 224)] * 2,
)
"""A few large and many small images, as in traffic: 32,252 patches, 8,063 tokens of Qwen3-VL."""

DEFAULT = (
    Workload("1x336", (Size(336, 336),)),
    Workload("8x336", (Size(336, 336),) * 8),
    Workload("20x336", (Size(336, 336),) * 20),
    Workload("1x1024", (Size(1024, 1024),)),
    Workload("1x1080p", (Size(1920, 1080),)),
    Workload("20xmixed", MIXED),
)
SHORT = tuple(each for each in DEFAULT if each.name in ("1x336", "8x336", "1x1080p"))
"""For runs over all families."""
SOUNDS = (
    Workload("1x5s", seconds=(5,)),
    Workload("1x30s", seconds=(30,)),
    Workload("8x30s", seconds=(30,) * 8),
    Workload("20x10s", seconds=(10,) * 20),
)
"""For models that take sounds."""

PEAK_FLOPS_PER_SECOND = {"H100": 790e12, "H200": 790e12}
"""Dense bf16 GEMM throughput, measured on an H200 (not the data sheet's), by a part of the device's
name. An H100 SXM computes as fast."""


def floor_ms(operations: int, device: str) -> float | None:
    """The time at the device's peak throughput; None if the peak is unknown."""
    peaks = (peak for name, peak in PEAK_FLOPS_PER_SECOND.items() if name in device)
    peak = next(peaks, None)
    return operations / peak * 1e3 if peak else None


@dataclass(frozen=True, slots=True)
class ModeFigures:
    """Wall-clock times of synchronised calls, and the error of their rows."""

    mode: str
    median_ms: float
    p99_ms: float
    error: float
    """Of the worst item: Frobenius norm of the difference over that of the float32 rows."""
    host_ms: float | None = None
    """Median of packing and metadata alone; None for transformers."""
    budgets: tuple[int, ...] = ()
    """The graphs that were replayed, one per pack and path with tokens; empty: eager."""
    padding_ratio: float = 0
    """Padding tokens over all tokens computed."""


@dataclass(frozen=True, slots=True)
class WorkloadReport:
    name: str
    items: int
    patches: int
    tokens: int
    floor_ms: float | None
    """floor_ms of the GEMMs, convolutions and attention in the float32 tower."""
    figures: list[ModeFigures]


@dataclass(frozen=True, slots=True)
class ModelReport:
    model: str
    reference: str
    """The float32 tower that rows are compared with: transformers', or ours in plain torch."""
    workloads: list[WorkloadReport]
    every_budget: list[WorkloadReport]
    """One small image with a row per budget, if --every-budget asks for it."""

    def correct(self) -> bool:
        """Whether every output is within the tolerance; NaN is not."""
        return all(
            figure.error <= (FP8_TOLERANCE if figure.mode == "fp8" else TOLERANCE)
            for workload in self.workloads + self.every_budget
            for figure in workload.figures
        )


@dataclass(frozen=True, slots=True)
class EngineReport:
    date: str
    command: str
    device: str
    versions: dict[str, str]
    repeats: int
    models: list[ModelReport]

    def made(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{self.date}, {versions}, {self.repeats} timed calls each"


def table(model: ModelReport, device: str) -> Table:
    title = f"{model.model}, {device}, errors relative to {model.reference} in float32"
    # Narrow enough that a row is one line of a log.
    shown = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        min_width=len(title) + 2,
    )
    shown.add_column("workload", max_width=20, overflow="fold")
    shown.add_column("mode", no_wrap=True)
    for name in ("median ms", "p99 ms", "host ms", "of floor", "padding", "error", "floor ms"):
        shown.add_column(name, justify="right", no_wrap=True)
    for workload in model.every_budget + model.workloads:
        floor = workload.floor_ms
        for place, figure in enumerate(workload.figures):
            shown.add_row(
                "" if place else workload.name,
                figure.mode,
                milliseconds(figure.median_ms),
                milliseconds(figure.p99_ms),
                milliseconds(figure.host_ms),
                f"{floor / figure.median_ms:.0%}" if floor else NOTHING,
                f"{figure.padding_ratio:.1%}" if figure.budgets else NOTHING,
                f"{figure.error:.1e}",
                milliseconds(floor),
            )
        shown.add_section()
    return shown


def milliseconds(value: float | None) -> str:
    """Three significant figures."""
    if value is None:
        return NOTHING
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def plot(report: EngineReport, path: Path) -> None:
    from matplotlib.figure import Figure  # optional, and slow to import

    count = len(report.models)
    figure = Figure(figsize=(INCHES[0], INCHES[1] * count), layout="constrained")
    parts = figure.subplots(count, 1, squeeze=False)
    for axes, model in zip(parts[:, 0], report.models, strict=True):
        draw(axes, model.model, model.workloads)
    figure.supxlabel(f"{report.device}, {report.made()}", fontsize="small")
    figure.savefig(path, dpi=110, format="png")


def draw(axes: Axes, title: str, workloads: Sequence[WorkloadReport]) -> None:
    """Bars by workload and mode on a log scale, a dashed mark at each floor."""
    modes = [figure.mode for figure in workloads[0].figures]
    width = BARS / len(modes)
    for place, mode in enumerate(modes):
        lefts = [index - BARS / 2 + width * place for index in range(len(workloads))]
        times = [each.figures[place].median_ms for each in workloads]
        bars = axes.bar(lefts, times, width, align="edge", label=mode)
        axes.bar_label(bars, fmt="%.3g", fontsize="x-small", padding=1)
    floors = {i: each.floor_ms for i, each in enumerate(workloads) if each.floor_ms is not None}
    if floors:
        lefts, rights = ([place + side for place in floors] for side in (-BARS / 2, BARS / 2))
        heights = list(floors.values())
        axes.hlines(heights, lefts, rights, colors="black", linestyles="dashed", label="floor")
    axes.set_yscale("log")
    axes.margins(y=0.12)
    axes.set_xticks(range(len(workloads)), [each.name for each in workloads])
    axes.set_ylabel("median, ms")
    axes.set_title(title)
    axes.legend(fontsize="small")
