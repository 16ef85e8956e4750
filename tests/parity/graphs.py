"""Graphs and random patches for the tests that compare rows with transformers' rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from actors.engine.budgets import Segments
from actors.engine.device import Device
from actors.engine.graphs import GraphSet
from actors.models.tower import Tower
from actors.types import ItemPlan


def captured(
    tower: Tower, path: str, budgets: Sequence[int | None], segments: Segments
) -> GraphSet:
    """Graphs on the CPU, for every budget that is not None or 0.

    Their input patches hold random bytes, as if an earlier pack had left them there. The replay of
    each graph over them is checked to be finite.
    """
    graphs = GraphSet(tower, path, [each for each in budgets if each], segments, Device())
    graphs.capture(lambda budget, seconds: None)
    if graphs.budgets:
        graphs.inputs.tensors["patches"].random_(0, 256)
    assert all(replay().isfinite().all() for replay in graphs.replays.values())
    return graphs


def random_patches(plans: Sequence[ItemPlan], row_bytes: int) -> list[Tensor]:
    """uint8 [patches, row_bytes] of each item. All items differ."""
    generator = torch.Generator().manual_seed(len(plans))
    shapes = [(plan.patches, row_bytes) for plan in plans]
    return [
        torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator) for shape in shapes
    ]
