"""Devices: streams, capture, copies. Device is the CPU; engine/cuda.py overrides it for a GPU.

Packing, padding, staging and post-processing are the same code on both. Also here: the static
inputs that graphs read, and the readback of a pack's rows by item.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from actors.engine.slices import Pace
from actors.errors import StartError
from actors.kernels import Shapes
from actors.kernels.gemm.fp8 import Fp8Rows, quantised

MEDIA = ("patches", "later")
"""Inputs that hold what clients sent, item after item; all others are metadata."""
ALIGNED_BYTES = 256  # as torch's allocators align: kernels may read 16 bytes at a time

MediaRows = Mapping[str, Sequence[Tensor]]
"""For each input of media: uint8, one tensor per item, on the host or on the device."""

Rows = Callable[[], Tensor]
"""Waits for rows that are being copied to the host, or to memory of their own on the device, and
returns them. Nobody else writes to that memory."""


class Places:
    """Where the metadata of one graph lies in a buffer that all graphs of a path share, so that one
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
        """The buffer, of `size_bytes`, with the first rows of each input filled from the host. The
        others may hold another graph's metadata: they are zeroed, which is a valid index."""
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
        """Zero at first: valid indices and positions."""
        self.tensors = {
            name: torch.zeros(shape, dtype=dtype, device=device)
            for name, (shape, dtype) in shapes.items()
            if name in MEDIA
        }
        """Inputs of media, for the largest graph; a smaller one reads the first rows."""
        self.metadata = torch.zeros(Places(shapes).size_bytes, dtype=torch.uint8, device=device)
        """Large enough for every graph; see Places."""

    def stage(self, metadata: Tensor, rows: MediaRows) -> None:
        """Writes the inputs of the next launch; called within `Device.running`.

        `metadata`: what Places.packed gives; it is never written to again. Of each input of media
        only the first rows are written; the others keep their contents.
        """
        self.metadata[: len(metadata)] = metadata
        for name, parts in rows.items():
            copy_rows(parts, self.tensors[name][: count(parts)])


class Device:
    """The CPU: where a GPU would replay a graph, runs the forward on the static inputs. All
    methods, and those of Inputs, are called from one thread, the engine's."""

    backend = "cpu"
    device = torch.device("cpu")
    name = "cpu"
    """Devices of one name are equally fast."""
    measuring_seconds = 1.0
    """How long the budgets of a path are measured at start, from the smallest on; images too. 0:
    all of them, budgets from the largest on."""
    limit_bytes: int | None = None
    """Of `memory_bytes`, set by `limit`."""
    pace: Pace | None = None
    """When slices of a replay may be launched. None: replays are whole, and never wait."""

    def __init__(self, slice_seconds: float = 0) -> None:
        """`slice_seconds`: about how long a slice of a replay may take; 0: replays are whole."""
        if slice_seconds:
            self.pace = Pace(slice_seconds)

    def limit(self, size_bytes: int) -> None:
        """Bounds `memory_bytes` from now on; not on the CPU. Raises StartError."""

    def running(self) -> AbstractContextManager[object]:
        """The context for forward passes and replays."""
        return nullcontext()

    def beside(self) -> Device:
        """The same device for another path: what runs there may overlap with what runs here."""
        return self

    def fork(self) -> None:
        """Everything launched beside from now on waits for what was launched here before."""

    def join(self) -> None:
        """Everything launched here from now on waits for what was launched beside before."""

    def inputs(self, shapes: Shapes) -> Inputs:
        return Inputs(shapes, self.device)

    def host_buffer(self, size_bytes: int) -> Tensor:
        """uint8, uninitialised, in host memory that is copied to the device asynchronously."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def capture(
        self, run: Callable[[], Tensor], *, kept: bool, tuned: bool
    ) -> Callable[[], Tensor]:
        """Returns the replay; a GPU runs once to warm up and captures, the CPU runs nothing.

        Its result is valid until the next replay of any graph of this device. `kept`: graphs that
        are captured later leave the result alone. `tuned`: GEMMs may time their algorithms, which
        takes up to seconds, so only before anything is served.
        """
        pace = self.pace
        if pace is None:
            return run

        def replay() -> Tensor:
            """In one slice, which any thread may launch."""
            output: list[Tensor] = []
            launch = torch.inference_mode()(lambda: output.append(run()))
            pace.launch([(pace.slice_seconds, launch)])
            return output[0]

        return replay

    def read_back(self, rows: Tensor) -> Rows:
        """Starts the copy of an output to the host. The output may be overwritten afterwards."""
        copy = rows.clone()
        return lambda: copy

    def keep(self, parts: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Starts copies of these rows on the device, each in memory of its own. The rows may be
        overwritten afterwards."""
        copies = [part.clone() for part in parts]
        return lambda: copies

    def memory_bytes(self) -> int:
        """Device memory of this process, without the driver's; not counted on the CPU."""
        return 0

    def used_bytes(self) -> int:
        """Device memory in use by all processes and the driver; not counted on the CPU."""
        return 0

    def alive(self) -> bool:
        """False: nothing can succeed on the device any more, and the process must be replaced."""
        return True


def start_readback(
    device: Device,
    packed: Tensor,
    tokens: Sequence[int],
    stays: Sequence[bool],
    in_fp8: Sequence[bool],
) -> Callable[[], list[Tensor | Fp8Rows]]:
    """Starts the copies of a pack's rows [all tokens, width]; called within `Device.running`.

    `stays`: which items' rows stay on the device; `in_fp8`: which leave it in FP8. What it returns
    waits for the copies, and gives [tokens, width] of each item.
    """
    parts = packed[: sum(tokens)].split(list(tokens))
    kinds = list(zip(stays, in_fp8, strict=True))
    waits: dict[tuple[bool, bool], Callable[[], Sequence[Tensor | Fp8Rows]]] = {}
    for kind in dict.fromkeys(kinds):
        its = [part for part, one in zip(parts, kinds, strict=True) if one == kind]
        if kind[0]:
            waits[kind] = device.keep(its)
            continue
        rows = packed if len(its) == len(parts) else torch.cat(its)
        read = read_fp8 if kind[1] else read_rows
        waits[kind] = read(device, rows, list(map(len, its)))

    def wait_for_all() -> list[Tensor | Fp8Rows]:
        found = {kind: iter(wait()) for kind, wait in waits.items()}
        return [next(found[kind]) for kind in kinds]

    return wait_for_all


def read_rows(device: Device, rows: Tensor, sizes: Sequence[int]) -> Callable[[], Sequence[Tensor]]:
    """Starts the copy of the rows of items; what it returns gives each item's."""
    host = device.read_back(rows)
    return lambda: host()[: sum(sizes)].split(list(sizes))


def read_fp8(device: Device, rows: Tensor, sizes: Sequence[int]) -> Callable[[], Sequence[Fp8Rows]]:
    """As read_rows, of rows that are quantised on the device first."""
    made = quantised(rows[: sum(sizes)])
    # Scales first: a second readback waits for the first, and these are few.
    scales = read_rows(device, made.scales, sizes)
    values = read_rows(device, made.values, sizes)
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
    from actors.engine.cuda import CudaDevice  # which imports this file

    return CudaDevice(slice_seconds)
