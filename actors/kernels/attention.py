"""Attention within segments of one packed sequence, and which kernel computes it: see `choose`.

Which patches attend to which is data, never a shape: an attention has static inputs of its own
(`inputs`), fills them on the host for each pack (`metadata`) and reads them on the device
(`__call__`). So a captured graph serves every layout that fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.errors import StartError
from actors.kernels import Shapes as Shapes
from actors.kernels import Values as Values
from actors.kernels.hopper.attention import HopperAttention, kernels_for
from actors.kernels.triton.attention import HEAD_SIZES, TritonAttention


class Attention(Protocol):
    """One way to compute attention. `name` appears in logs, metrics and the bench."""

    name: str

    def inputs(self, patches: int, segments: int) -> Shapes:
        """Shapes and dtypes of the static inputs for a budget of this many patches."""

    def metadata(self, lengths: Sequence[int], patches: int, segments: int) -> dict[str, Tensor]:
        """Host values of those inputs for segments of these lengths, padded to full size."""

    def __call__(self, qkv: Tensor, values: Values) -> Tensor:
        """Packed q, k, v [patches, 3, heads, head size], rotated, to [patches, heads x head size].

        May write over qkv, and the result may be a view of it. Rows beyond the last segment:
        finite if qkv is, otherwise undefined.
        """


class SegmentAttention:
    """The reference: one scaled_dot_product_attention per segment. Any device and dtype.

    Reads segment ends as Python numbers, so it cannot be captured by a CUDA graph.
    """

    name = "reference"

    def inputs(self, patches: int, segments: int) -> Shapes:
        """Segment ends; unused ones repeat the last: empty segments."""
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


def choose(
    device: torch.device, dtype: torch.dtype, head_size: int, *, captured: bool = False
) -> Attention:
    """The fastest attention for this device, dtype and head size.

    CUDA in 16 bits: HopperAttention on compute capability 9.0 for head sizes 64, 72 and 80, else
    TritonAttention for HEAD_SIZES. Everything else: SegmentAttention, which a CUDA graph cannot
    hold. `captured`: it must be capturable; raises StartError if it is not.
    """
    if device.type != "cuda":
        return SegmentAttention()
    known_size, known_dtype = head_size in HEAD_SIZES, dtype in (torch.bfloat16, torch.float16)
    if known_size and known_dtype:
        kernels = kernels_for(device, dtype, head_size)
        return HopperAttention(kernels, head_size) if kernels else TritonAttention()
    if captured and known_size:
        raise StartError(
            f"model.dtype is {str(dtype).removeprefix('torch.')}, for which there is no attention "
            "that a CUDA graph can hold: set it to bfloat16 or float16, or graphs.mode to off"
        )
    if captured:
        raise StartError(
            f"attention heads of {head_size} values: CUDA graphs hold those of "
            f"{', '.join(map(str, HEAD_SIZES))} only: set graphs.mode to off"
        )
    return SegmentAttention()
