"""Towers of the third kind: the whole image is one view, each crop another, on two paths.

A view is one attention segment of fixed length, its patches row by row. Both paths run the same
weights, over views of two sizes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from actors.errors import CheckpointError
from actors.kernels.attention import Attention, Shapes, Values
from actors.spec.model_spec import ModelSpec
from actors.spec.sizing import PATHS, ViewSizing
from actors.types import ItemPlan


class ViewTower(ABC):
    """See Tower. The metadata of an item is the number of its views."""

    def __init__(self, spec: ModelSpec, attention: Attention) -> None:
        if not isinstance(spec.sizing, ViewSizing):
            raise CheckpointError(f"model.id {spec.id!r}: this tower needs a sizing in views")
        self.spec = spec
        self.views: ViewSizing = spec.sizing
        self.attention = attention
        self.dtype: torch.dtype = getattr(torch, spec.dtype)

    @abstractmethod
    def view_rows(self, path: str) -> int:
        """Rows of a view in the blocks: its tokens or patches, and class tokens."""

    @abstractmethod
    def forward(self, path: str, values: Values) -> Tensor:
        """See Tower."""

    @abstractmethod
    def postprocess(self, outputs: Sequence[Tensor], plans: Sequence[ItemPlan]) -> Tensor:
        """See Tower."""

    def inputs(self, path: str, tokens: int, segments: int) -> Shapes:
        """A budget holds as many whole views as fit."""
        views, patches = self.count(path, tokens), self.views.side_patches[PATHS.index(path)] ** 2
        return {
            "patches": ((views * patches, 3 * self.views.patch_size**2), torch.uint8),
            **self.attention.inputs(views * self.view_rows(path), views),
        }

    def metadata(
        self, path: str, plans: Sequence[ItemPlan], tokens: int, segments: int
    ) -> dict[str, Tensor]:
        views, rows = self.count(path, tokens), self.view_rows(path)
        used = self.count(path, sum(plan.path_tokens[PATHS.index(path)] for plan in plans))
        return self.attention.metadata([rows] * used, views * rows, views)

    def count(self, path: str, tokens: int) -> int:
        """Whole views with this many tokens."""
        return tokens // self.views.view_tokens[PATHS.index(path)]
