"""What differs between a GPU and a machine without one: streams, capture, copies.

Both devices have the same methods, so that packing, padding, staging and post-processing are the
same code everywhere. All methods but `Rows.wait` are called from one thread, the engine's. Also
here: the static inputs that graphs read, and the readback of a pack's rows by item.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from actors.kernels.attention import Shapes

MEDIA = ("patches", "later")
"""Inputs that hold what clients sent, item after item; all others are metadata."""

ALIGNED_BYTES = 256  # as torch's allocators align: kernels may read 16 bytes at a time

MediaRows = Mapping[str, Sequence[Tensor]]
"""For each input of media: uint8, one tensor per item, on the host or on the device."""


class Rows(Protocol):
    """An output that is being copied to the host, or to memory of its own on the device."""

    def wait(self) -> Tensor:
        """The rows, in memory that nobody else writes to. Blocks until they are there."""


class Inputs(Protocol):
    """The static inputs of a path: allocated once, written for each pack."""

    tensors: dict[str, Tensor]
    """Inputs of media, for the largest graph; a smaller one reads the first rows."""
    metadata: Tensor
    """uint8, large enough for every graph; see Places."""

    def stage(self, metadata: Tensor, rows: MediaRows) -> None:
        """Writes the inputs of the next launch; called within `Device.running`.

        `metadata`: what Places.packed gives; it is never written to again. Of each input of media
        only the first rows are written; the others keep their contents.
        """


class Device(Protocol):
    backend: str
    device: torch.device

    def running(self) -> AbstractContextManager[object]:
        """The context for forward passes and replays."""

    def beside(self) -> Device:
        """The same device for another path: what runs there may overlap with what runs here."""

    def fork(self) -> None:
        """Everything launched beside from now on waits for what was launched here before."""

    def join(self) -> None:
        """Everything launched here from now on waits for what was launched beside before."""

    def inputs(self, shapes: Shapes) -> Inputs:
        """Static inputs of these shapes, zero at first."""

    def host_buffer(self, size_bytes: int) -> Tensor:
        """uint8, uninitialised, in host memory that is copied to the device asynchronously."""

    def capture(
        self, run: Callable[[], Tensor], *, kept: bool, tuned: bool
    ) -> Callable[[], Tensor]:
        """Runs once to warm up, captures, and returns the replay.

        Its result is valid until the next replay of any graph of this device. `kept`: graphs that
        are captured later leave the result alone. `tuned`: GEMMs may time their algorithms, which
        takes up to seconds, so only before anything is served.
        """

    def read_back(self, rows: Tensor) -> Rows:
        """Starts the copy of an output to the host. The output may be overwritten afterwards."""

    def keep(self, parts: Sequence[Tensor]) -> Rows:
        """Starts a copy of these rows, concatenated, on the device. They may be overwritten
        afterwards."""

    def memory_bytes(self) -> int:
        """Device memory of this process, without the driver's."""

    def used_bytes(self) -> int:
        """Device memory in use by all processes and the driver."""

    def alive(self) -> bool:
        """False: nothing can succeed on the device any more, and the process must be replaced."""


class Places:
    """Where the metadata of one graph lies in a buffer that all graphs of a path share.

    The metadata of a pack is one piece of memory, so that one copy moves all of it to the device.
    """

    def __init__(self, shapes: Shapes) -> None:
        self.spans: dict[str, tuple[slice, tuple[int, ...], torch.dtype]] = {}
        self.size_bytes = 0
        for name, (shape, dtype) in shapes.items():
            if name not in MEDIA:
                used = torch.Size(shape).numel() * dtype.itemsize
                self.spans[name] = (slice(self.size_bytes, self.size_bytes + used), shape, dtype)
                self.size_bytes += -(-used // ALIGNED_BYTES) * ALIGNED_BYTES

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        return {
            name: buffer[span].view(dtype).view(shape)
            for name, (span, shape, dtype) in self.spans.items()
        }

    def packed(self, values: Mapping[str, Tensor], buffer: Tensor) -> Tensor:
        """The buffer, of `size_bytes`, with the first rows of each input filled from the host.

        The other rows are zeroed, which is a valid index, because they may hold another graph's
        metadata.
        """
        target = buffer.numpy()  # slicing tensors would take longer than the copies
        for name, (span, _, dtype) in self.spans.items():
            value = values[name].numpy().reshape(-1).view(np.uint8)
            end = span.start + len(value)
            assert values[name].dtype == dtype, f"{name} is not {dtype}. This is a bug."
            assert end <= span.stop, f"{name} has too many rows. This is a bug."
            target[span.start : end] = value
            target[end : span.stop] = 0
        return buffer


@dataclass(frozen=True, slots=True)
class PackReadback:
    """The rows of a pack while they are copied to the host, or within the device."""

    rows: Mapping[bool, Rows]
    """Those that stay on the device (True) and those that do not, in the order of the items."""
    tokens: Sequence[int]
    """Of each item."""
    stays: Sequence[bool]

    def wait(self) -> list[Tensor]:
        """[tokens, width] of each item. Blocks until they are there."""
        there = {stay: rows.wait() for stay, rows in self.rows.items()}
        found, ends = [], dict.fromkeys(there, 0)
        for tokens, stay in zip(self.tokens, self.stays, strict=True):
            start, ends[stay] = ends[stay], ends[stay] + tokens
            found.append(there[stay][start : ends[stay]])
        return found


def start_readback(
    device: Device, packed: Tensor, tokens: Sequence[int], stays: Sequence[bool]
) -> PackReadback:
    """Starts the copies of a pack's rows [all tokens, width]; called within `Device.running`.

    `stays`: which items' rows stay on the device.
    """
    rows: dict[bool, Rows] = {}
    if not any(stays):
        rows[False] = device.read_back(packed)
        return PackReadback(rows, tokens, stays)
    parts = list(zip(packed[: sum(tokens)].split(list(tokens)), stays, strict=True))
    rows[True] = device.keep([part for part, stay in parts if stay])
    if leaving := [part for part, stay in parts if not stay]:
        rows[False] = device.read_back(torch.cat(leaving))
    return PackReadback(rows, tokens, stays)


@dataclass(frozen=True, slots=True)
class HostRows:
    """Rows that are on the host already."""

    rows: Tensor

    def wait(self) -> Tensor:
        return self.rows


class HostInputs:
    """Static inputs that the forward reads in place."""

    def __init__(self, tensors: dict[str, Tensor], metadata: Tensor) -> None:
        self.tensors = tensors
        self.metadata = metadata

    def stage(self, metadata: Tensor, rows: MediaRows) -> None:
        self.metadata[: len(metadata)] = metadata
        for name, parts in rows.items():
            copy_rows(parts, self.tensors[name][: count(parts)])


class CpuDevice:
    """See Device. Where a GPU would replay a graph, runs the forward on the static inputs."""

    backend = "cpu"
    device = torch.device("cpu")

    def running(self) -> AbstractContextManager[object]:
        return nullcontext()

    def beside(self) -> Device:
        return self

    def fork(self) -> None:
        """Nothing to order."""

    def join(self) -> None:
        """Nothing to order."""

    def inputs(self, shapes: Shapes) -> Inputs:
        return HostInputs(*allocate(shapes, self.device))

    def host_buffer(self, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    def capture(
        self, run: Callable[[], Tensor], *, kept: bool, tuned: bool
    ) -> Callable[[], Tensor]:
        run()
        return run

    def read_back(self, rows: Tensor) -> Rows:
        """A copy: the rows may be a view of something that is written again."""
        return HostRows(rows.clone())

    def keep(self, parts: Sequence[Tensor]) -> Rows:
        return HostRows(torch.cat(list(parts)))

    def memory_bytes(self) -> int:
        return 0  # not counted on the CPU

    def used_bytes(self) -> int:
        return 0  # not counted on the CPU

    def alive(self) -> bool:
        return True


def allocate(shapes: Shapes, device: torch.device) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs of media, and the buffer of metadata. Zeros: valid indices and positions."""
    media = {
        name: torch.zeros(shape, dtype=dtype, device=device)
        for name, (shape, dtype) in shapes.items()
        if name in MEDIA
    }
    return media, torch.zeros(Places(shapes).size_bytes, dtype=torch.uint8, device=device)


def copy_rows(parts: Sequence[Tensor], out: Tensor) -> Tensor:
    """Concatenates the parts into `out` in one operation."""
    if len(parts) == 1:
        return out.copy_(parts[0], non_blocking=True)
    return torch.cat(list(parts), out=out)


def concatenated(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """The parts as one tensor; on `device` if any of them is there."""
    if any(part.device == device for part in parts):
        parts = [part.to(device) for part in parts]
    return torch.cat(list(parts))


def count(parts: Sequence[Tensor]) -> int:
    return sum(map(len, parts))
