"""Builds the blocks in the form that options.block_form names, among them that of torch.compile."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from actors.kernels.attention import Attention
from actors.models.layers.block import BlocksForm, BlockWeights, ReferenceBlocks, Style
from actors.options import BlockForm


class CompiledBlocks(ReferenceBlocks):
    """ReferenceBlocks with each half of a block through torch.compile; attention stays as it is.

    The number of rows is dynamic, so that all layers and budgets share one compilation. The first
    call compiles, which takes seconds. It must not happen in a capture, which is why every capture
    warms up first.
    """

    form: BlockForm = "compile"

    def __init__(
        self,
        weights: Sequence[BlockWeights],
        style: Style,
        attention: Attention,
        taps: Sequence[int] = (),
    ) -> None:
        super().__init__(weights, style, attention, taps)
        self.compiled_before = torch.compile(super().before, fullgraph=True)
        self.compiled_after = torch.compile(super().after, fullgraph=True)

    def before(
        self, x: Tensor, cos: Tensor | None, sin: Tensor | None, layer: BlockWeights
    ) -> Tensor:
        for rows in (x, cos, sin):
            if rows is not None:
                torch._dynamo.mark_dynamic(rows, 0)
        made: Tensor = self.compiled_before(x, cos, sin, layer)
        return made

    def after(self, x: Tensor, attended: Tensor, layer: BlockWeights) -> Tensor:
        for rows in (x, attended):
            torch._dynamo.mark_dynamic(rows, 0)
        made: Tensor = self.compiled_after(x, attended, layer)
        return made


def blocks_of(form: BlockForm) -> BlocksForm:
    if form == "reference":
        return ReferenceBlocks
    if form == "compile":
        return CompiledBlocks
    from actors.models.layers.fast import FastBlocks  # needs Triton, which comes with CUDA

    return FastBlocks
