"""Workloads, modes and results of the engine's benchmark. Pure data, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from actors.types import Size

Mode = Literal["transformers", "eager", "exact", "budget", "fast", "compile", "reference"]
MODES: tuple[Mode, ...] = get_args(Mode)
DEFAULT_MODES = MODES[:4]
MODE_HELP = (
    "transformers: its own tower; eager: ours without graphs; exact: a graph of exactly the "
    "workload's tokens; budget: the service's own graphs and packing; fast, compile, "
    "reference: the same with graphs.blocks set to it (compile needs a C++ compiler)"
)

TOLERANCE = 2e-2
"""Relative error against float32: bf16 alone makes about 1.3e-2 on full towers."""


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    sizes: tuple[Size, ...]


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
"""Few large and many small images, as in traffic: 32,252 patches, 8,063 tokens of Qwen3-VL."""

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

PEAK_FLOPS_PER_SECOND = {"H200": 790e12}
"""Measured dense bf16 GEMM throughput (not the data sheet's), by a part of the device's name."""


def floor_seconds(operations: int, device: str) -> float | None:
    """The time at the device's peak throughput; None if the peak is unknown."""
    peaks = (peak for name, peak in PEAK_FLOPS_PER_SECOND.items() if name in device)
    peak = next(peaks, None)
    return operations / peak if peak else None


PUBLISHED_DEVICE = "H200"
SOURCE = "vLLM 0.26.0, FlashAttention-3, graphs, one H200, 2026-11-20: not measured in this run"
"""vLLM's own Qwen3-VL tower and EncoderCudaGraphManager, torch 2.11, random weights, from pixels on
the GPU, synchronised, median of 50 calls; the better of its default budgets and budgets made for
each workload. Its 2B tower gave NaN for 1x336."""
VLLM_MS: Mapping[str, tuple[float, ...]] = {
    "qwen3vl-2b": (2.28, 7.65, 15.2, 10.7, 28.1, 76),
    "qwen3vl-8b": (2.83, 8.84, 20.3, 14.7, 38.2, 96),
}
"""Of the default workloads, in their order."""
GOAL_MS: Mapping[str, tuple[float, ...]] = {
    "qwen3vl-2b": (1.1, 4.5, 10, 7.8, 21, 58),
    "qwen3vl-8b": (1.5, 6.3, 14, 10.5, 28.5, 78),
}


def published(model: str, workload: str, device: str) -> tuple[float, float] | None:
    """vLLM's milliseconds and this project's goal; None for another model, workload or device."""
    names = [default.name for default in DEFAULT]
    if PUBLISHED_DEVICE not in device or model not in VLLM_MS or workload not in names:
        return None
    place = names.index(workload)
    return VLLM_MS[model][place], GOAL_MS[model][place]


@dataclass(frozen=True, slots=True)
class Times:
    """Wall-clock times of synchronised calls."""

    median_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class ModeFigures:
    mode: Mode
    times: Times
    host_ms: float | None
    """Median of packing and metadata alone; None for transformers."""
    budgets: tuple[int, ...]
    """The graphs that were replayed, one per pack and path with tokens; empty: eager."""
    padding_ratio: float
    """Padding tokens over all tokens computed."""
    error: float
    """Of the worst item: Frobenius norm of the difference over that of the float32 rows."""


@dataclass(frozen=True, slots=True)
class WorkloadReport:
    name: str
    images: int
    patches: int
    tokens: int
    operations: int
    floor_ms: float | None
    figures: list[ModeFigures]


@dataclass(frozen=True, slots=True)
class BudgetTime:
    budget: int
    times: Times
    error: float


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Time per call that the device spends in kernels of one name."""

    name: str
    calls: float
    total_us: float
    share: float


@dataclass(frozen=True, slots=True)
class Profile:
    """Where the time of one workload goes. Kernels that overlap count in full."""

    workload: str
    mode: Mode
    kernels: list[KernelTime]


@dataclass(frozen=True, slots=True)
class ModelReport:
    model: str
    reference: str
    """The float32 tower that rows are compared with: transformers', or ours in plain torch."""
    workloads: list[WorkloadReport]
    budget_times: list[BudgetTime]
    profiles: list[Profile]

    def correct(self) -> bool:
        """Whether every output is within the tolerance; NaN is not."""
        errors = [figure.error for workload in self.workloads for figure in workload.figures]
        errors += [each.error for each in self.budget_times]
        return all(error <= TOLERANCE for error in errors)


@dataclass(frozen=True, slots=True)
class EngineReport:
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
