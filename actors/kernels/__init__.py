"""CUDA kernels behind plain functions of tensors. Know no model, graph or configuration.

attention.py chooses between those of triton/ and hopper/; gemm/ has the GEMMs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each static input of a graph, by name."""

Values = Mapping[str, Tensor]  # the inputs themselves
