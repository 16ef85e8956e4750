"""Attention by hopper.cu over a table of tiles and strips: see tiles.py for the idea.

Builds the table on the host. Knows nothing of graphs or budgets beyond the bounds that it is given.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from actors.attention import Shapes, Values
from actors.kernels import hopper, nvrtc

SHORT_PATCHES = 1024
"""Budgets up to this many patches are cut into strips alone: there are few, and many processors."""


class HopperTiles:
    """CUDA of compute capability 9.0, bfloat16 and float16, head sizes 64, 72 and 80."""

    name = "hopper"

    def __init__(self, kernel: nvrtc.Kernel) -> None:
        """`kernel`: hopper.kernel_for the device, dtype and head size."""
        self.kernel = kernel

    def inputs(self, patches: int, segments: int) -> Shapes:
        """The table, int32: a first row of counts, then one row a tile and one a strip."""
        # The second bound keeps the table from shrinking where tiles begin.
        rows = max(patches // item_rows(patches), min(patches, SHORT_PATCHES) // hopper.STRIP_ROWS)
        return {"attention_items": ((1 + rows + segments, 4), torch.int32)}

    def metadata(self, lengths: Sequence[int], patches: int, segments: int) -> dict[str, Tensor]:
        """Items of the longest segment first: what ends last starts first."""
        shape, _ = self.inputs(patches, segments)["attention_items"]
        return {"attention_items": item_table(lengths, item_rows(patches), shape[0])}

    def __call__(self, qkv: Tensor, values: Values) -> Tensor:
        """See Attention. Written over q; rows beyond the segments keep their q."""
        return hopper.attend_(qkv, values["attention_items"], self.kernel)


def item_rows(patches: int) -> int:
    """Queries of most items in a budget of so many patches."""
    return hopper.STRIP_ROWS if patches <= SHORT_PATCHES else hopper.TILE_ROWS


def item_table(lengths: Sequence[int], rows: int, size: int) -> Tensor:
    """int32 [size, 4]: (tiles, strips, 0, 0), then for each tile and then for each strip its
    segment's start and end, the first row of the table with such items of that segment, from 0 on,
    and their number; unused rows are zero.

    With `rows` of a tile, a segment ends in a strip where its last tile would hold no more queries.
    """
    length = np.asarray(lengths, dtype=np.int32)
    end = length.cumsum(dtype=np.int32)
    longest_first = np.argsort(-length, kind="stable")
    length, end = length[longest_first], end[longest_first]
    strips = -(-length // hopper.STRIP_ROWS)
    if rows == hopper.STRIP_ROWS:
        tiles = np.zeros_like(strips)
    else:
        tiles = (strips + hopper.GROUPS - 2) // hopper.GROUPS
        strips = (strips % hopper.GROUPS == 1).astype(np.int32)
    counts = np.concatenate([tiles, strips])
    first = counts.cumsum(dtype=np.int32) - counts
    segments = np.stack([np.tile(end - length, 2), np.tile(end, 2), first, counts], axis=1)
    table = np.zeros((size, 4), dtype=np.int32)
    table[0, :2] = tiles.sum(), strips.sum()
    table[1 : 1 + counts.sum()] = segments.repeat(counts, axis=0)
    return torch.from_numpy(table)
