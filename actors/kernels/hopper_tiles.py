"""Attention by hopper.cu over a table of tiles and short segments: see tiles.py for the idea.

Builds the table on the host. Knows nothing of graphs or budgets beyond the bounds that it is given.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from actors.kernels import hopper, nvrtc
from actors.kernels.attention import Shapes, Values

LARGE_PATCHES = 4096
"""Budgets from here on take a head size's last shape, smaller ones its first."""


class HopperTiles:
    """CUDA of compute capability 9.0, bfloat16 and float16, head sizes 64, 72 and 80."""

    name = "hopper"

    def __init__(self, kernels: Sequence[nvrtc.Kernel], size: int) -> None:
        """`kernels`: hopper.kernels_for the device, dtype and this head size."""
        self.forms = list(zip(hopper.SHAPES[size], kernels, strict=True))

    def inputs(self, patches: int, segments: int) -> Shapes:
        """The table, int32: a first row with the count of entries, then one row an entry."""
        rows = 1 + patches // hopper.TILE_ROWS + segments
        return {"attention_items": ((rows, 4), torch.int32)}

    def metadata(self, lengths: Sequence[int], patches: int, segments: int) -> dict[str, Tensor]:
        """Items of the longest segment first: what ends last starts first."""
        shape, _ = self.inputs(patches, segments)["attention_items"]
        kept_patches = self.form(patches)[0].kept_patches
        return {"attention_items": item_table(lengths, kept_patches, shape[0])}

    def __call__(self, qkv: Tensor, values: Values) -> Tensor:
        """See Attention. Written over q; rows beyond the segments keep their q."""
        shape, kernel = self.form(len(qkv))
        return hopper.attend_(qkv, values["attention_items"], kernel, shape.keys)

    def form(self, patches: int) -> tuple[hopper.Shape, nvrtc.Kernel]:
        """Of a budget of so many patches."""
        return self.forms[-1 if patches >= LARGE_PATCHES else 0]


def item_table(lengths: Sequence[int], kept_patches: int, size: int) -> Tensor:
    """int32 [size, 4]: (entries, strips of the only segment or 0, 0, 0), then the entries; unused
    rows are zero. The strips are given of a segment that is longer than `kept_patches` only.

    A segment of up to `kept_patches` patches is one entry, a longer one has an entry for each tile.
    An entry is its segment's start and end, the first entry of that segment, from 0 on, and
    65536 x the strips of an entry at most + the segment's entries.
    """
    length = np.asarray(lengths, dtype=np.int32)
    end = length.cumsum(dtype=np.int32)
    longest_first = np.argsort(-length, kind="stable")
    length, end = length[longest_first], end[longest_first]
    strips = -(-length // hopper.STRIP_ROWS)
    most = np.where(length > kept_patches, hopper.GROUPS, np.maximum(strips, 1)).astype(np.int32)
    counts = -(-strips // most)
    first = counts.cumsum(dtype=np.int32) - counts
    segments = np.stack([end - length, end, first, most << 16 | counts], axis=1)
    table = np.zeros((size, 4), dtype=np.int32)
    table[0, 0] = counts.sum()
    if len(lengths) == 1 and length[0] > kept_patches:
        table[0, 1] = strips[0]
    table[1 : 1 + counts.sum()] = segments.repeat(counts, axis=0)
    return torch.from_numpy(table)
