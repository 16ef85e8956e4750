"""CUDA kernels behind plain functions of tensors. They know no model, graph or configuration.

attention.py chooses between the attention kernels of triton/ and hopper/; gemm/ has the GEMMs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each static input of a graph, by name."""

Values = Mapping[str, Tensor]  # the inputs themselves

LOG2_E = 1.4426950408889634
"""Kernels compute exp(x) as 2 ** (x times this)."""

GATED = ("swiglu", "swiglu_10", "geglu_tanh")
"""The activations that multiply one half of a row by the activation of the other."""


def checked(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values that a `cuda.bindings` call returned. Raises RuntimeError if its status is not
    success."""
    code, *values = result
    if code.value:
        raise RuntimeError(f"CUDA: {code!r}")
    return tuple(values)
