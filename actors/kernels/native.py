"""CUDA's shared objects that torch brought, through ctypes, what calls return, what devices can."""

from __future__ import annotations

import ctypes
from functools import cache

import torch

FEW_ROWS = 640
"""Up to here kernels are so short on an H200 that the gaps between them count (BENCHMARKS.md)."""


def shared_object(name: str) -> ctypes.CDLL:
    """The one of torch's own CUDA release, such as "nvrtc". OSError where torch has none."""
    major = (torch.version.cuda or "13").split(".")[0]
    return ctypes.CDLL(f"lib{name}.so.{major}")


def check(call: str, code: int) -> None:
    """RuntimeError unless the code is that of success."""
    if code:
        raise RuntimeError(f"{call} failed with code {code}")


@cache
def overlaps(device: torch.device, rows: int) -> bool:
    """Whether kernels of so many rows begin there before the one in front of them has ended."""
    return rows <= FEW_ROWS and torch.cuda.get_device_capability(device) >= (9, 0)
