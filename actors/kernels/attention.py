"""Attention within segments of one packed sequence, and which kernel computes it: see `choose`.

Which patches attend to which is data, never a shape: an attention has static inputs of its own
(`inputs`), fills them on the host for each pack (`metadata`) and reads them on the device
(`__call__`). So a captured graph serves every layout that fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from actors.errors import StartError
from actors.kernels import Shapes as Shapes
from actors.kernels import Values as Values
from actors.kernels import attention_fp8
from actors.kernels.attention_fp8 import rotate_given
from actors.kernels.hopper.attention import HopperAttention, kernels_for
from actors.kernels.hopper.attention_fp8 import long_kernels

HEAD_SIZES = tuple(range(64, 129, 8))
SHORT_ROWS = 64
LONG_ROWS = 128
LONG_PATCHES = 1024  # budgets up to this use short tiles, so that there are enough for all SMs


class Attention(Protocol):
    """One way to compute attention. `name` appears in logs, metrics and the bench."""

    name: str

    def inputs(self, patches: int, segments: int) -> Shapes:
        """Shapes and dtypes of the static inputs for a budget of this many patches."""

    def metadata(self, lengths: Sequence[int], patches: int, segments: int) -> dict[str, Tensor]:
        """Host values of those inputs, for segments of these lengths, padded to full size."""

    def __call__(self, qkv: Tensor, values: Values) -> Tensor:
        """Packed q, k, v [patches, 3, heads, head size], rotated, to [patches, heads x head size].

        May overwrite qkv, and the result may be a view of it. Rows beyond the last segment are
        finite if qkv is, but otherwise undefined.
        """

    def fp8(self, qkv: Tensor, values: Values, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        """Like `__call__`, with long segments in FP8 if `attention_fp8.has` says so. Rotates q and
        k first, unless cos is None; see `rotate_`."""


class SegmentAttention:
    """The reference: one scaled_dot_product_attention per segment. Any device and dtype.

    Reads segment ends as Python numbers, so it cannot be captured by a CUDA graph.
    """

    name = "reference"

    def inputs(self, patches: int, segments: int) -> Shapes:
        """Segment ends. Unused ones repeat the last, which makes them empty segments."""
        return {"segment_ends": ((segments,), torch.int32)}

    def metadata(self, lengths: Sequence[int], patches: int, segments: int) -> dict[str, Tensor]:
        ends = torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return {"segment_ends": F.pad(ends, (0, segments - len(lengths)), value=sum(lengths))}

    def __call__(self, qkv: Tensor, values: Values) -> Tensor:
        query, key, value = qkv.permute(1, 2, 0, 3)
        out = torch.zeros_like(query)
        start = 0
        for end in dict.fromkeys(values["segment_ends"].tolist()):
            rows = slice(start, end)
            out[:, rows] = F.scaled_dot_product_attention(
                query[None, :, rows], key[None, :, rows], value[None, :, rows]
            )[0]
            start = end
        return out.transpose(0, 1).flatten(1)

    def fp8(self, qkv: Tensor, values: Values, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        rotate_given(qkv, cos, sin)
        out = self(qkv, values)
        if attention_fp8.has(qkv):
            ends = list(dict.fromkeys(values["segment_ends"].tolist()))
            lengths = [end - start for start, end in pairwise([0, *ends])]
            attention_fp8.attended(qkv, lengths, out)
        return out


class TritonAttention:
    """Our Triton kernel over a table of query tiles. CUDA, bfloat16 and float16, HEAD_SIZES.

    A captured launch serves any layout that fits its table, and takes only the time of that layout.
    """

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
        from actors.kernels.triton.attention_kernel import attend_  # needs Triton

        return attend_(qkv, values["attention_tiles"], tile_rows(len(qkv)))

    def fp8(self, qkv: Tensor, values: Values, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        """Runs in 16 bits: there is no FP8 form of this kernel."""
        rotate_given(qkv, cos, sin)
        return self(qkv, values)


def tile_rows(patches: int) -> int:
    return SHORT_ROWS if patches <= LONG_PATCHES else LONG_ROWS


def tile_table(lengths: Sequence[int], rows: int, size: int) -> Tensor:
    """int32 [size, 4]: (tiles, 0, 0, 0), then for each tile of `rows` queries its segment's
    start, end, first tile and number of tiles; unused rows are zero."""
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


def choose(
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    *,
    captured: bool = False,
    fp8: bool = False,
) -> Attention:
    """The fastest attention for this device, dtype and head size.

    CUDA in 16 bits: HopperAttention on compute capability 9.0 for head sizes 64, 72 and 80, else
    TritonAttention for HEAD_SIZES. Everything else: SegmentAttention, which a CUDA graph cannot
    capture. `captured`: it must be capturable; raises StartError if it is not. `fp8`: some layers
    need Attention.fp8.
    """
    if device.type != "cuda":
        return SegmentAttention()
    if head_size in HEAD_SIZES and dtype in (torch.bfloat16, torch.float16):
        kernels = kernels_for(device, dtype, head_size)
        if not kernels:
            return TritonAttention()
        long = long_kernels(device, dtype, head_size) if fp8 else None
        return HopperAttention(kernels, head_size, long)
    if captured:
        raise StartError(
            f"model.dtype is {str(dtype).removeprefix('torch.')}, and attention heads have "
            f"{head_size} values: CUDA graphs hold bfloat16 and float16 with heads of "
            f"{', '.join(map(str, HEAD_SIZES))} only: set model.dtype, or graphs.mode to off"
        )
    return SegmentAttention()
