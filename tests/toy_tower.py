"""A tower with an obvious result, for any device: rows are sums of their tokens' patches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from actors.families.registry import read
from actors.kernels.attention import Shapes, Values
from actors.options import ModelOptions
from actors.spec.model_spec import ModelSpec
from actors.types import Item, ItemPlan

POISON = 255
"""A patch that begins with this byte makes the forward pass of its whole pack fail."""

OPTIONS = ModelOptions(id="qwen3vl-tiny", load_format="dummy", dtype="float32")


class ToyTower:
    """Rows of four values: the sum of each of a token's four patches."""

    def __init__(self) -> None:
        self.spec: ModelSpec = read(OPTIONS)
        self.forwards = 0

    def patchify(self, image: Tensor) -> tuple[ItemPlan, Tensor]:
        raise AssertionError("the tests make their items themselves")

    def inputs(self, path: str, tokens: int, segments: int) -> Shapes:
        return {
            "patches": ((4 * tokens, 3), torch.uint8),
            "items": ((segments,), torch.int32),
        }

    def video_inputs(self, path: str, tokens: int) -> Shapes:
        return {}

    def metadata(
        self, path: str, plans: Sequence[ItemPlan], tokens: int, segments: int
    ) -> dict[str, Tensor]:
        ends = [plan.patches for plan in plans]
        return {"items": torch.tensor(ends + [0] * (segments - len(ends)), dtype=torch.int32)}

    def forward(self, path: str, values: Values) -> Tensor:
        self.forwards += 1
        patches = values["patches"]
        covered = int(values["items"].sum())
        if bool((patches[:covered, 0] == POISON).any()):
            raise ValueError("poisoned")
        return patches.float().sum(1).view(-1, 4)

    def postprocess(self, outputs: Sequence[Tensor], plans: Sequence[ItemPlan]) -> Tensor:
        return outputs[0]


def toy_item(tokens: int, seed: int, *, poisoned: bool = False) -> Item:
    generator = np.random.default_rng(seed)
    patches = generator.integers(0, 200, (4 * tokens, 3), dtype=np.uint8)
    if poisoned:
        patches[0, 0] = POISON
    return Item(ItemPlan((1, 2, 2 * tokens), 4 * tokens, tokens, (tokens,)), patches)


def toy_rows(item: Item) -> Tensor:
    return torch.from_numpy(item.patches).float().sum(1).view(-1, 4)
