"""What the engine asks of a model: so little that the engine never names one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from actors.kernels.attention import Shapes, Values
from actors.spec.model_spec import ModelSpec
from actors.types import ItemPlan


class Tower(Protocol):
    """One vision tower on one device."""

    spec: ModelSpec

    def inputs(self, path: str, tokens: int, segments: int) -> Shapes:
        """Static inputs of a graph for a budget of `tokens`; no shape shrinks as `tokens` grows."""

    def metadata(
        self, path: str, plans: Sequence[ItemPlan], tokens: int, segments: int
    ) -> dict[str, Tensor]:
        """Host values of the inputs other than the patches, for items packed in this order.

        A value with fewer rows than its input leaves the rest as it is: no segment covers it.
        """

    def forward(self, path: str, values: Values) -> Tensor:
        """[tokens, width]. Fixed shapes in and out, nothing read back: safe to capture."""

    def postprocess(self, outputs: Sequence[Tensor], plans: Sequence[ItemPlan]) -> Tensor:
        """[tokens of all items, width], item after item, from each path's output."""


@runtime_checkable
class VideoTower(Tower, Protocol):
    """A tower whose family takes videos."""

    def video_inputs(self, path: str, tokens: int) -> Shapes:
        """Static inputs that a graph for packs with videos has beside `inputs`.

        Empty: the graph for images serves.
        """
