"""What the engine is measured on, and how much arithmetic that is. Pure: no torch, no device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actors.models.qwen3vl_config import Architecture
from actors.types import ItemPlan, Size


@dataclass(frozen=True, slots=True)
class Workload:
    """Images that are encoded together."""

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
"""Few large and many small images, as traffic is: 32,252 patches, 8,063 tokens of Qwen3-VL."""

DEFAULT = (
    Workload("1x336", (Size(336, 336),)),
    Workload("8x336", (Size(336, 336),) * 8),
    Workload("20x336", (Size(336, 336),) * 20),
    Workload("1x1024", (Size(1024, 1024),)),
    Workload("1x1080p", (Size(1920, 1080),)),
    Workload("20xmixed", MIXED),
)

PEAK_FLOPS_PER_SECOND = {"H200": 790e12}
"""Dense bf16 matrix products, as measured (not the data sheet's), by a part of the device's name.

A device that is not here has no floor.
"""


def operations(arch: Architecture, plans: Sequence[ItemPlan]) -> int:
    """Floating-point operations of the published tower's matrix products for these items.

    A multiply-add is two. Attention is counted within each temporal group, its softmax and all
    norms are not.
    """
    width, merged = arch.width, arch.width * arch.merge_size**2
    embedding = width * 3 * arch.frames * arch.patch_size**2
    block = 4 * width**2 + 2 * width * arch.mlp_width
    merger = merged**2 + merged * arch.out_width
    a_patch = 2 * (embedding + arch.depth * block)
    a_token = 2 * merger * (1 + len(arch.taps))
    return sum(
        plan.patches * (a_patch + 4 * arch.depth * width * group_patches(plan))
        + plan.tokens * a_token
        for plan in plans
    )


def group_patches(plan: ItemPlan) -> int:
    """Patches that see each other."""
    return plan.grid_thw[1] * plan.grid_thw[2]


def floor_seconds(arch: Architecture, plans: Sequence[ItemPlan], device: str) -> float | None:
    """What a device of this name would take at its peak; None for one whose peak is not known."""
    peaks = (peak for name, peak in PEAK_FLOPS_PER_SECOND.items() if name in device)
    peak = next(peaks, None)
    return operations(arch, plans) / peak if peak else None
