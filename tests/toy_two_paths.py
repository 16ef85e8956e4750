"""The toy tower with a second path: an item's local rows, negated, then its global rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from actors.kernels.attention import Values
from actors.spec.sizing import PATHS
from actors.types import Item, ItemPlan
from tests.toy_tower import ToyTower


class TwoPathToy(ToyTower):
    """Rows of four values as in ToyTower, negated on the local path."""

    def __init__(self) -> None:
        super().__init__()
        self.spec = replace(self.spec, paths=PATHS, width=4, dtype="float32")

    def metadata(
        self, path: str, plans: Sequence[ItemPlan], tokens: int, segments: int
    ) -> dict[str, Tensor]:
        index = PATHS.index(path)
        ends = [plan.path_patches[index] for plan in plans][:segments]
        return {"items": torch.tensor(ends + [0] * (segments - len(ends)), dtype=torch.int32)}

    def forward(self, path: str, values: Values) -> Tensor:
        rows = super().forward(path, values)
        return -rows if path == "local" else rows

    def postprocess(self, outputs: Sequence[Tensor], plans: Sequence[ItemPlan]) -> Tensor:
        split = [
            rows.split([plan.path_tokens[index] for plan in plans])
            for index, rows in enumerate(outputs)
        ]
        return torch.cat([part for pair in zip(*reversed(split), strict=True) for part in pair])


def two_path_item(whole: int, crops: int, seed: int) -> Item:
    """An item with `whole` and `crops` tokens on its two paths, its bytes drawn from `seed`."""
    tokens = whole + crops
    patches = np.random.default_rng(seed).integers(0, 200, (4 * tokens, 3), dtype=np.uint8)
    plan = ItemPlan(
        grid_thw=(1, 2, 2 * tokens),
        patches=4 * tokens,
        tokens=tokens,
        path_tokens=(whole, crops),
        path_patches=(4 * whole, 4 * crops),
    )
    return Item(plan, patches)


def two_path_rows(item: Item) -> Tensor:
    whole, _ = item.plan.path_tokens
    rows = torch.from_numpy(item.patches).float().sum(1).view(-1, 4)
    return torch.cat([-rows[whole:], rows[:whole]])
