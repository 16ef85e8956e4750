"""What the engine is measured on, and what a device would need at least. Pure: no torch."""

from __future__ import annotations

from dataclasses import dataclass

from actors.types import Size


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

SHORT = tuple(each for each in DEFAULT if each.name in ("1x336", "8x336", "1x1080p"))
"""For runs over all families."""

PEAK_FLOPS_PER_SECOND = {"H200": 790e12}
"""Dense bf16 matrix products, as measured (not the data sheet's), by a part of the device's name.

A device that is not here has no floor.
"""


def floor_seconds(operations: int, device: str) -> float | None:
    """What a device of this name would take at its peak; None for one whose peak is not known."""
    peaks = (peak for name, peak in PEAK_FLOPS_PER_SECOND.items() if name in device)
    peak = next(peaks, None)
    return operations / peak if peak else None
