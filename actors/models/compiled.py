"""The blocks of towers that have no fast form, through torch.compile: one compilation, all budgets.

Attention stays as it is. The number of rows is dynamic, so that neither layers nor budgets compile
anew; torch keeps what it compiled on disk (TORCHINDUCTOR_CACHE_DIR) for the next start.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from actors.kernels.attention import Attention
from actors.models.block import BlockWeights, ReferenceBlocks, Style


class CompiledBlocks(ReferenceBlocks):
    """See Blocks. The first call compiles, which takes seconds."""

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
        """See ReferenceBlocks."""
        for rows in (x, cos, sin):
            if rows is not None:
                torch._dynamo.mark_dynamic(rows, 0)
        made: Tensor = self.compiled_before(x, cos, sin, layer)
        return made

    def after(self, x: Tensor, attended: Tensor, layer: BlockWeights) -> Tensor:
        """See ReferenceBlocks."""
        for rows in (x, attended):
            torch._dynamo.mark_dynamic(rows, 0)
        made: Tensor = self.compiled_after(x, attended, layer)
        return made
