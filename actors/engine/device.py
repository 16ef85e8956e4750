"""Devices: streams, capture, copies. Device is the CPU; engine/cuda.py overrides it for a GPU.

Packing, padding, staging and post-processing are the same code on both. Also here: the static
inputs that graphs read, and the readback of a pack's rows, item by item.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from actors.allocator import groups
from actors.engine.slices import Pace, Slice
from actors.errors import StartError
from actors.kernels import Shapes
from actors.kernels.gemm.fp8 import Fp8Rows, quantised
from actors.rows.lending import Lender

MEDIA = ("patches", "later")
"""Inputs that hold the clients' media, item after item. All others are metadata."""
ALIGNED_BYTES = 256  # as torch's allocators align: kernels may read 16 bytes at a time

MediaRows = Mapping[str, Sequence[Tensor]]
"""For each media input: uint8, one tensor per item, on the host or on the device."""

Copies = Callable[[], Sequence[Tensor]]
"""Waits until rows have been copied to the host, or to separate memory on the device, and returns
the copies. Nothing else writes to them."""
SHARED_BLOCK_BYTES = 2**20
"""Items whose rows are smaller share blocks of host memory, of at most this size."""


class Places:
    """The layout of a graph's metadata in a buffer that all graphs of a path share, so that one
    copy moves all metadata of a pack to the device."""

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
        """Fills the first rows of each input in `buffer` (`size_bytes`) and returns it. The others
        may hold another graph's metadata, so they are zeroed; 0 is a valid index."""
        target = buffer.numpy()  # slicing tensors would take longer than the copies
        for name, (span, _, dtype) in self.spans.items():
            value = values[name].numpy().reshape(-1).view(np.uint8)
            end = span.start + len(value)
            assert values[name].dtype == dtype, f"{name} is not {dtype}. This is a bug."
            assert end <= span.stop, f"{name} has too many rows. This is a bug."
            target[span.start : end] = value
            target[end : span.stop] = 0
        return buffer


class Inputs:
    """The static inputs of a path: allocated once, written for each pack."""

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        """All inputs are zero at first, because 0 is a valid index and position."""
        self.tensors = {
            name: torch.zeros(shape, dtype=dtype, device=device)
            for name, (shape, dtype) in shapes.items()
            if name in MEDIA
        }
        """Media inputs, sized for the largest graph. Smaller graphs read the first rows."""
        self.metadata = torch.zeros(Places(shapes).size_bytes, dtype=torch.uint8, device=device)
        """Large enough for every graph; see Places."""

    def stage(self, metadata: Tensor, rows: MediaRows) -> None:
        """Writes the inputs of the next launch. Must be called within `Device.running`.

        `metadata`: from Places.packed; it is never written to again. Only the first rows of each
        media input are written; the others keep their contents.
        """
        self.metadata[: len(metadata)] = metadata
        for name, parts in rows.items():
            copy_rows(parts, self.tensors[name][: count(parts)])


class Device:
    """The CPU. Where a GPU would replay a graph, it runs the forward pass on the static inputs. All
    methods but `running`, and those of Inputs, are called from the engine's thread only."""

    backend = "cpu"
    device = torch.device("cpu")
    name = "cpu"
    """Devices of the same name are equally fast."""
    measuring_seconds = 1.0
    """Time limit at start for measuring the budgets of a path, smallest first, and for measuring
    images. 0: no limit, and budgets are measured largest first."""
    limit_bytes: int | None = None
    """Limit of `memory_bytes`, set by `limit`."""
    pace: Pace | None = None
    """Decides when slices of a replay are launched. None: replays are not sliced and never wait."""
    lender: Lender | None = None
    """Of the row memory, set by `lend`. None: rows are read back into other host memory."""

    def __init__(self, slice_seconds: float = 0) -> None:
        """`slice_seconds`: about how long a slice of a replay takes. 0: replays are not sliced."""
        if slice_seconds:
            self.pace = Pace(slice_seconds)

    def limit(self, size_bytes: int) -> None:
        """Limits `memory_bytes` from now on. Does nothing on the CPU. Raises StartError."""

    def lend(self, lender: Lender) -> None:
        """Reads rows back into this lender's memory from now on. Raises RuntimeError or ImportError
        if the device cannot write to it."""
        self.lender = lender

    def to_host(self, rows: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """Starts copying consecutive parts of rows to the host, into row memory if there is room,
        and returns the copies. A large one has a block of its own, which is freed with it."""
        copies: list[Tensor] = []
        width = rows[:1].nbytes
        for group in groups([length * width for length in lengths], SHARED_BLOCK_BYTES):
            its = [lengths[place] for place in group]
            part, rows = rows[: sum(its)], rows[sum(its) :]
            block = self.lender.block(part.nbytes) if self.lender else None
            if block is None:
                memory = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
            else:
                memory = torch.from_numpy(block).view(part.dtype).view(part.shape)
            copies += memory.copy_(part, non_blocking=True).split(its)
        return copies

    def running(self) -> AbstractContextManager[object]:
        """The context for forward passes and replays."""
        return nullcontext()

    def beside(self) -> Device:
        """The same device for another path, whose work may overlap with that of this one."""
        return self

    def fork(self) -> None:
        """Makes later work on `beside` devices wait for the work launched here so far."""

    def join(self) -> None:
        """Makes later work here wait for the work launched on `beside` devices so far."""

    def inputs(self, shapes: Shapes) -> Inputs:
        return Inputs(shapes, self.device)

    def host_buffer(self, size_bytes: int) -> Tensor:
        """uint8, uninitialised, in host memory that can be copied to the device asynchronously."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def capture(
        self, run: Callable[[], Tensor], *, kept: bool, tuned: bool
    ) -> Callable[[], Tensor]:
        """Captures a forward pass, and returns the function that replays it. A GPU runs the pass
        once first, to warm up; the CPU runs nothing yet.

        The result of a replay is valid until the next replay of any graph of this device. `kept`:
        graphs captured later do not overwrite the result. `tuned`: GEMMs may time their algorithms,
        which takes up to seconds, so it is only for graphs captured before anything is served.
        """
        pace = self.pace
        if pace is None:
            return run

        def replay() -> Tensor:
            """Runs as one slice, which any thread may launch."""
            output: list[Tensor] = []
            launch = torch.inference_mode()(lambda: output.append(run()))
            pace.launch([Slice(launch, pace.slice_seconds)])
            return output[0]

        return replay

    def read_back(self, rows: Tensor, lengths: Sequence[int]) -> Copies:
        """Starts copying consecutive parts of an output to the host: see `to_host`. The output may
        be overwritten after the call."""
        copies = self.to_host(rows, lengths)
        return lambda: copies

    def keep(self, parts: Sequence[Tensor]) -> Copies:
        """Starts copying these rows on the device, each to its own memory. The rows may be
        overwritten after the call."""
        copies = [part.clone() for part in parts]
        return lambda: copies

    def memory_bytes(self) -> int:
        """Device memory of this process, without the driver's. 0 on the CPU."""
        return 0

    def used_bytes(self) -> int:
        """Device memory in use by all processes and the driver. 0 on the CPU."""
        return 0

    def alive(self) -> bool:
        """False: nothing can succeed on the device any more, so the process must be replaced."""
        return True


def start_readback(
    device: Device,
    packed: Tensor,
    tokens: Sequence[int],
    stays: Sequence[bool],
    in_fp8: Sequence[bool],
) -> Callable[[], list[Tensor | Fp8Rows]]:
    """Starts copying a pack's rows [all tokens, width]. Must be called within `Device.running`.

    `stays`: whether an item's rows stay on the device. `in_fp8`: whether they leave it in FP8.
    Returns a function that waits for the copies and returns the rows [tokens, width] of each item.
    """
    parts = packed[: sum(tokens)].split(list(tokens))
    kinds = list(zip(stays, in_fp8, strict=True))
    waits: dict[tuple[bool, bool], Callable[[], Sequence[Tensor | Fp8Rows]]] = {}
    for kind in dict.fromkeys(kinds):
        its = [part for part, one in zip(parts, kinds, strict=True) if one == kind]
        if kind[0]:
            waits[kind] = device.keep(its)
            continue
        rows = packed[: sum(tokens)] if len(its) == len(parts) else torch.cat(its)
        sizes = list(map(len, its))
        waits[kind] = read_fp8(device, rows, sizes) if kind[1] else device.read_back(rows, sizes)

    def wait_for_all() -> list[Tensor | Fp8Rows]:
        found = {kind: iter(wait()) for kind, wait in waits.items()}
        return [next(found[kind]) for kind in kinds]

    return wait_for_all


def read_fp8(device: Device, rows: Tensor, sizes: Sequence[int]) -> Callable[[], Sequence[Fp8Rows]]:
    """Starts copying rows to the host after quantising them on the device."""
    made = quantised(rows)
    # Scales first, because the second readback waits for the first, and scales are small.
    scales = device.read_back(made.scales, sizes)
    values = device.read_back(made.values, sizes)
    return lambda: list(map(Fp8Rows, values(), scales()))


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


def open_device(kind: str, slice_seconds: float = 0) -> Device:
    """ "cpu", or the "cuda" device that this process owns. Raises StartError if there is none."""
    if kind == "cpu":
        return Device(slice_seconds)
    if not torch.cuda.is_available():
        raise StartError(
            "torch sees no CUDA device here: check the driver, encoder.num_gpus and that torch is "
            "a CUDA build, or choose the device cpu (encoder.device, --device)"
        )
    from actors.engine.cuda import CudaDevice  # not at the top, because it imports this file

    return CudaDevice(slice_seconds)
