"""What the engine asks of a model: so little that the engine never names one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from actors.attention import Shapes, Values
from actors.spec import ModelSpec
from actors.types import Bytes, ItemPlan


class Tower(Protocol):
    """One vision tower on one device."""

    spec: ModelSpec

    def patchify(self, image: Tensor) -> tuple[ItemPlan, Bytes]:
        """A decoded image, uint8 [3, height, width], to its plan and uint8 patches on the host."""

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
