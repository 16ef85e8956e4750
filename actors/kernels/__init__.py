"""CUDA kernels behind plain functions of tensors. Know no model, graph or configuration.

attention.py chooses between those of triton/ and hopper/; gemm/ has the GEMMs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each static input of a graph, by name."""

Values = Mapping[str, Tensor]  # the inputs themselves


def checked(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a call of `cuda.bindings` returned besides its status. RuntimeError on failure."""
    code, *values = result
    if code.value:
        raise RuntimeError(f"CUDA: {code!r}")
    return tuple(values)
