"""What the engine asks of a tower, and what a family says to have one built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from actors.kernels.attention import Attention, Shapes, Values
from actors.models.layers.block import BlocksForm
from actors.models.layers.weights import Expected, Weights
from actors.spec.model_spec import ModelSpec
from actors.types import ItemPlan

Parts = TypeVar("Parts")


class Tower(Protocol):
    """One vision tower on one device. The engine knows towers by this protocol only."""

    spec: ModelSpec

    def inputs(self, path: str, tokens: int, segments: int) -> Shapes:
        """Static inputs of a graph for a budget of `tokens`; no shape shrinks as `tokens` grows."""

    def video_inputs(self, path: str, tokens: int) -> Shapes:
        """Static inputs of a graph for packs with videos, besides `inputs`.

        Empty: the graph for images serves, or there are no videos.
        """
        return {}

    def metadata(
        self, path: str, plans: Sequence[ItemPlan], tokens: int, segments: int
    ) -> dict[str, Tensor]:
        """Host values of the inputs other than the patches, for items packed in this order.

        A value with fewer rows than its input leaves the rest unchanged: no segment covers it.
        """

    def forward(self, path: str, values: Values) -> Tensor:
        """[tokens, width]. Fixed shapes in and out, nothing read back: safe to capture. Rows beyond
        the last segment are finite, otherwise undefined."""

    def postprocess(self, outputs: Sequence[Tensor], plans: Sequence[ItemPlan]) -> Tensor:
        """[tokens of all items, width], item after item, from each path's output."""


def chosen(rows: Sequence[Tensor], places: Tensor) -> Tensor:
    """Those of all these rows that `places`, int64 on the host, counts through one after another.
    The engine's thread does not wait until `places` is copied."""
    together = torch.cat(list(rows))
    if together.is_cuda:
        places = places.pin_memory().to(together.device, non_blocking=True)
    return together.index_select(0, places)


@dataclass(frozen=True, slots=True)
class Family(Generic[Parts]):
    """How to build the tower of one spec. Each family's tower.py has `family(spec)`."""

    prefixes: tuple[str, ...]
    """Of the tower's tensors in a checkpoint, after `model.`, which not all of them have."""
    expected: Expected
    head_size: int
    """Decides which attention kernel is chosen."""
    parts: Callable[[ModelSpec, Weights], Parts]
    """From tensors as `expected` names them."""
    tower: Callable[[ModelSpec, Parts, Attention, BlocksForm], Tower]
    unused: frozenset[str] = frozenset()
    """Tensors that a checkpoint may have and that are not read, unless they are expected."""
    last_norms: tuple[str, ...] = ()
    """Parts of the names of norms that end a branch: random ones are a tenth as large. Otherwise
    attention scores would grow from layer to layer, and rounding errors double every three layers:
    with 63 layers of width 256 float32 was 6e-2 from float64, at a tenth 1e-6."""
