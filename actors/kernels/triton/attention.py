"""Attention within segments by Triton, over a table of query tiles that is built on the host.

A captured launch serves any layout that fits its table, and takes only the time of that layout.
Needs no Triton itself: the kernel is attention_kernel.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from actors.kernels import Shapes, Values

HEAD_SIZES = (64, 72, 80, 88, 96, 112, 128)
SHORT_ROWS = 64
LONG_ROWS = 128
LONG_PATCHES = 1024
"""Budgets of up to this many patches use short tiles, so that there are enough for all SMs."""


class TritonAttention:
    """See Attention. CUDA, bfloat16 and float16, head sizes that are in HEAD_SIZES."""

    name = "tiles"

    def inputs(self, patches: int, segments: int) -> Shapes:
        """The table, int32: a first row with the number of tiles, then one row per tile."""
        # The second bound keeps the table from shrinking where long tiles begin.
        tiles = max(patches // tile_rows(patches), min(patches, LONG_PATCHES) // SHORT_ROWS)
        return {"attention_tiles": ((1 + tiles + segments, 4), torch.int32)}

    def metadata(self, lengths: Sequence[int], patches: int, segments: int) -> dict[str, Tensor]:
        """Tiles of the longest segment come first, because they take longest."""
        shape, _ = self.inputs(patches, segments)["attention_tiles"]
        return {"attention_tiles": tile_table(lengths, tile_rows(patches), shape[0])}

    def __call__(self, qkv: Tensor, values: Values) -> Tensor:
        from actors.kernels.triton.attention_kernel import TileSizes, attend_  # needs Triton

        return attend_(qkv, values["attention_tiles"], TileSizes(tile_rows(len(qkv)), 64, 4, 3))


def tile_rows(patches: int) -> int:
    return SHORT_ROWS if patches <= LONG_PATCHES else LONG_ROWS


def tile_table(lengths: Sequence[int], rows: int, size: int) -> Tensor:
    """int32 [size, 4]: (tiles, 0, 0, 0), then for each tile of `rows` queries its segment's
    start, end, first tile and number of tiles; unused rows are zero.
    """
    length = np.asarray(lengths, dtype=np.int32)
    end = length.cumsum(dtype=np.int32)
    longest_first = np.argsort(-length, kind="stable")
    tiles = (-(-length // rows))[longest_first]
    segments = np.stack(
        [(end - length)[longest_first], end[longest_first], tiles.cumsum() - tiles, tiles], axis=1
    )
    table = np.zeros((size, 4), dtype=np.int32)
    table[0, 0] = used = tiles.sum()
    table[1 : 1 + used] = segments.repeat(tiles, axis=0)
    return torch.from_numpy(table)
