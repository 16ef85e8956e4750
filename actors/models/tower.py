"""The `Tower` protocol that the engine uses, and `Family`, which says how to build a tower."""

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
    """One encoder on one device. The engine knows towers only by this protocol."""

    spec: ModelSpec

    def inputs(self, path: str, tokens: int, segments: int) -> Shapes:
        """Static inputs of a graph for a budget of `tokens`; no shape shrinks as `tokens` grows."""

    def video_inputs(self, path: str, tokens: int) -> Shapes:
        """Static inputs, besides `inputs`, of a graph for packs with videos.

        Empty if the tower takes no videos, or if the graph for images serves them, too.
        """
        return {}

    def metadata(
        self, path: str, plans: Sequence[ItemPlan], tokens: int, segments: int
    ) -> dict[str, Tensor]:
        """Values, on the host, of all inputs but the patches, for items packed in this order.

        A value may have fewer rows than its input. The other rows keep their old values, because
        no segment covers them.
        """

    def forward(self, path: str, values: Values) -> Tensor:
        """Returns [tokens, width]. Safe to capture: shapes are fixed, and nothing is copied to the
        host. Rows beyond the last segment are finite but otherwise undefined."""

    def postprocess(self, outputs: Sequence[Tensor], plans: Sequence[ItemPlan]) -> Tensor:
        """Makes the items' rows [tokens of all items, width] from the output of each path."""


def chosen(rows: Sequence[Tensor], places: Tensor) -> Tensor:
    """Selects from the concatenated `rows` by the indices `places`, int64 on the host. Does not
    wait until `places` is copied to the device, so the engine's thread is not blocked."""
    together = torch.cat(list(rows))
    if together.is_cuda:
        places = places.pin_memory().to(together.device, non_blocking=True)
    return together.index_select(0, places)


@dataclass(frozen=True, slots=True)
class Family(Generic[Parts]):
    """How to build the tower of a spec. Each family's tower.py defines `family(spec)`."""

    prefixes: tuple[str, ...]
    """Prefixes of the tower's tensor names in a checkpoint, without `model.`, which may precede
    them."""
    expected: Expected
    head_size: int
    """Decides which attention kernel is chosen."""
    parts: Callable[[ModelSpec, Weights], Parts]
    """Makes the parts from tensors with the names of `expected`."""
    tower: Callable[[ModelSpec, Parts, Attention, BlocksForm], Tower]
    unused: frozenset[str] = frozenset()
    """Tensors that a checkpoint may have. They are not read, unless they are expected, too."""
    faint: tuple[str, ...] = ()
    """Parts of the names of norms of which random ones are a tenth as large as others: those that
    end a branch, and those of queries if scores are not scaled. Otherwise attention scores are
    large or grow from layer to layer, and rounding errors double every three layers: with 63 layers
    of width 256, float32 differed from float64 by 6e-2, and by 1e-6 with the smaller norms."""
