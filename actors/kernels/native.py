"""CUDA's shared objects that torch brought, through ctypes, and what their calls return."""

from __future__ import annotations

import ctypes

import torch


def shared_object(name: str) -> ctypes.CDLL:
    """The one of torch's own CUDA release, such as "nvrtc". OSError where torch has none."""
    major = (torch.version.cuda or "13").split(".")[0]
    return ctypes.CDLL(f"lib{name}.so.{major}")


def check(call: str, code: int) -> None:
    """RuntimeError unless the code is that of success."""
    if code:
        raise RuntimeError(f"{call} failed with code {code}")
