"""The figures: what is written as JSON and shown in tables. Pure data, units in the names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from actors.options import BlockChoice, BlockForm

Mode = Literal["transformers", "eager", "exact", "budget", "fast", "compile", "reference"]
"""transformers' own tower; our forward without graphs; with a graph of exactly the workload's
tokens and segments; with the service's default graphs and packing; the same, with the blocks in
the form that `graphs.blocks` calls so."""

MODES: tuple[Mode, ...] = get_args(Mode)

DEFAULT_MODES = MODES[:4]

BLOCKS: dict[BlockChoice, Mode] = {
    "auto": "budget",
    **{form: form for form in get_args(BlockForm)},
}
"""The mode in which each form of the blocks is measured."""

TOLERANCE = 2e-2
"""Relative error against float32: bf16 alone makes about 1.3e-2 on full towers."""


@dataclass(frozen=True, slots=True)
class Times:
    """Synchronised wall-clock calls."""

    median_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class Figure:
    """One mode on one workload."""

    mode: Mode
    times: Times
    host_ms: float | None
    """Median of packing and metadata alone; None: not ours."""
    budgets: tuple[int, ...]
    """The graphs that were replayed, one a pack and path with tokens; none: eager."""
    padding_ratio: float
    """Tokens computed for nobody, of all that were computed."""
    error: float
    """Of the worst item: Frobenius norm of the difference over that of float32."""


@dataclass(frozen=True, slots=True)
class WorkloadReport:
    """One workload in every mode."""

    name: str
    images: int
    patches: int
    tokens: int
    operations: int
    floor_ms: float | None
    figures: list[Figure]


@dataclass(frozen=True, slots=True)
class BudgetTime:
    """The same small item replayed in one budget."""

    budget: int
    times: Times
    error: float


@dataclass(frozen=True, slots=True)
class Kernel:
    """What the device spends on kernels of one name in one call."""

    name: str
    calls: float
    total_us: float
    share: float


@dataclass(frozen=True, slots=True)
class Profile:
    """Where the time of one workload goes. Kernels that overlap count in full."""

    workload: str
    mode: Mode
    kernels: list[Kernel]


@dataclass(frozen=True, slots=True)
class ModelReport:
    """One tower with random weights."""

    model: str
    reference: str
    """What the errors are against, in float32: transformers' tower, or our own in plain torch."""
    workloads: list[WorkloadReport]
    budget_times: list[BudgetTime]
    profiles: list[Profile]

    def errors(self) -> list[float]:
        """Every relative error that was measured."""
        figures = (figure for workload in self.workloads for figure in workload.figures)
        return [figure.error for figure in figures] + [each.error for each in self.budget_times]

    def correct(self) -> bool:
        """Whether every output is within the tolerance; NaN is not."""
        return all(error <= TOLERANCE for error in self.errors())


@dataclass(frozen=True, slots=True)
class Report:
    """One run."""

    date: str
    command: str
    device: str
    versions: dict[str, str]
    dtype: str
    weights: str
    repeats: int
    warmup: int
    tolerance: float
    models: list[ModelReport]
