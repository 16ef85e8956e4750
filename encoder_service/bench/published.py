"""Figures that are not measured here: vLLM's on the same kind of machine, and the project's goals.

vLLM 0.26.0's own Qwen3-VL tower and EncoderCudaGraphManager, FlashAttention-3, torch 2.11, random
weights, one H200, 2026-11-20, from pixels on the GPU, synchronised, median of 50 calls; the better
of its default budgets and budgets made for each workload. Its 2B tower gave NaN for 1x336.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from encoder_service.bench.engine.workloads import DEFAULT

DEVICE = "H200"
SOURCE = "vLLM 0.26.0, FlashAttention-3, graphs, one H200, 2026-11-20: not measured in this run"

Line = tuple[float, ...]
"""Milliseconds of the default workloads, in their order."""

VLLM_MS: Mapping[str, Line] = {
    "qwen3vl-2b": (2.28, 7.65, 15.2, 10.7, 28.1, 76),
    "qwen3vl-8b": (2.83, 8.84, 20.3, 14.7, 38.2, 96),
}

GOAL_MS: Mapping[str, Line] = {
    "qwen3vl-2b": (1.1, 4.5, 10, 7.8, 21, 58),
    "qwen3vl-8b": (1.5, 6.3, 14, 10.5, 28.5, 78),
}


@dataclass(frozen=True, slots=True)
class Published:
    """Of one workload."""

    vllm_ms: float
    goal_ms: float


def published(model: str, workload: str, device: str) -> Published | None:
    """None: nothing is known for this model and workload, or this is another device."""
    names = [default.name for default in DEFAULT]
    if DEVICE not in device or model not in VLLM_MS or workload not in names:
        return None
    place = names.index(workload)
    return Published(VLLM_MS[model][place], GOAL_MS[model][place])
