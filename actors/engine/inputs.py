"""What the graphs of a path read: the rows of media, and beside them one buffer for all the rest.

The metadata of a pack is one piece of memory, so that it goes to the device in one copy, whole:
each graph finds its inputs in the same buffer at offsets of its own. Knows no tower, no graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from actors.kernels.attention import Shapes

MEDIA = ("patches", "later")
"""Inputs that hold what clients sent, item after item; all others are metadata."""

ALIGNED_BYTES = 256
"""As torch's allocators align: kernels may read 16 bytes at a time."""

Rows = Mapping[str, Sequence[Tensor]]
"""By the input of media that they fill, uint8, one tensor an item, on the host or the device."""


class Inputs(Protocol):
    """The static inputs of a path: allocated once, written pack after pack."""

    tensors: dict[str, Tensor]
    """Of media, for the largest graph; a smaller one reads the first rows."""
    metadata: Tensor
    """uint8, for the graph with the most; see Places."""

    def stage(self, metadata: Tensor, rows: Rows) -> None:
        """Writes the inputs of what is launched next; called within `Device.running`.

        `metadata`: as Places.packed gives it, never written to again. Of each input of media only
        the first rows are written; those beyond keep what they held.
        """


class Places:
    """Where the metadata of one graph lies in the buffer of all."""

    def __init__(self, shapes: Shapes) -> None:
        self.spans: dict[str, tuple[slice, tuple[int, ...], torch.dtype]] = {}
        self.size_bytes = 0
        for name, (shape, dtype) in shapes.items():
            if name not in MEDIA:
                used = torch.Size(shape).numel() * dtype.itemsize
                self.spans[name] = (slice(self.size_bytes, self.size_bytes + used), shape, dtype)
                self.size_bytes += -(-used // ALIGNED_BYTES) * ALIGNED_BYTES

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The inputs within a buffer of at least `size_bytes`."""
        return {
            name: buffer[span].view(dtype).view(shape)
            for name, (span, shape, dtype) in self.spans.items()
        }

    def packed(self, values: Mapping[str, Tensor], buffer: Tensor) -> Tensor:
        """The buffer, of `size_bytes`, with the first rows of each input filled from the host.

        The rows beyond are zero: valid as any index, and no other graph's metadata.
        """
        target = buffer.numpy()  # a call of torch for each slice would take longer than the copies
        for name, (span, _, dtype) in self.spans.items():
            value = values[name].numpy().reshape(-1).view(np.uint8)
            end = span.start + len(value)
            assert values[name].dtype == dtype, f"{name} is not {dtype}. This is a bug."
            assert end <= span.stop, f"{name} has too many rows. This is a bug."
            target[span.start : end] = value
            target[end : span.stop] = 0
        return buffer


class HostInputs:
    """Static inputs that the forward reads in place."""

    def __init__(self, tensors: dict[str, Tensor], metadata: Tensor) -> None:
        self.tensors = tensors
        self.metadata = metadata

    def stage(self, metadata: Tensor, rows: Rows) -> None:
        """See Inputs."""
        self.metadata[: len(metadata)] = metadata
        for name, parts in rows.items():
            joined(parts, self.tensors[name][: count(parts)])


def allocate(shapes: Shapes, device: torch.device) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs of media, and the buffer of metadata. Zeros: valid indices and positions."""
    media = {
        name: torch.zeros(shape, dtype=dtype, device=device)
        for name, (shape, dtype) in shapes.items()
        if name in MEDIA
    }
    return media, torch.zeros(Places(shapes).size_bytes, dtype=torch.uint8, device=device)


def joined(parts: Sequence[Tensor], out: Tensor) -> Tensor:
    """All rows of the parts in one operation, however many parts there are."""
    if len(parts) == 1:
        return out.copy_(parts[0], non_blocking=True)
    return torch.cat(list(parts), out=out)


def together(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """All rows of the parts on one device."""
    if any(part.device == device for part in parts):
        parts = [part.to(device) for part in parts]
    return torch.cat(list(parts))


def count(parts: Sequence[Tensor]) -> int:
    """Rows of all parts."""
    return sum(map(len, parts))
