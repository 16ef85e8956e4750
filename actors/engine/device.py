"""What differs between a GPU and a machine without one: streams, capture, copies. No more.

Both devices have the same verbs, so that packing, padding, staging and post-processing are the same
code everywhere. All verbs but `Rows.wait` are called from one thread, the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from actors.engine.inputs import HostInputs, Inputs, allocate
from actors.kernels.attention import Shapes


class Rows(Protocol):
    """An output on its way to the host, or to a place of its own on the device."""

    def wait(self) -> Tensor:
        """The rows where nobody else will write to them. Blocks until they are there."""


class Device(Protocol):
    """Where a tower runs."""

    backend: str
    device: torch.device

    def running(self) -> AbstractContextManager[object]:
        """The context that forward passes and replays run in."""

    def beside(self) -> Device:
        """The same device for another path: what runs there may overlap what runs here."""

    def fork(self) -> None:
        """What runs beside from now on comes after what was launched here before."""

    def join(self) -> None:
        """What runs here from now on comes after what was launched beside before."""

    def inputs(self, shapes: Shapes) -> Inputs:
        """Static inputs of these shapes, zero at first."""

    def host_buffer(self, size_bytes: int) -> Tensor:
        """uint8, of any content, in host memory that copies to the device need not wait for."""

    def capture(
        self, run: Callable[[], Tensor], *, kept: bool, tuned: bool
    ) -> Callable[[], Tensor]:
        """Runs once to warm up, records, and gives the replay.

        Its result lasts until the next replay of any graph of this device. `kept`: it has memory of
        its own among the graphs that are captured later, whose replays leave it alone.
        `tuned`: products may time their algorithms, which takes up to seconds: before all service.
        """

    def read_back(self, rows: Tensor) -> Rows:
        """Starts the copy of an output to the host; the output may be overwritten afterwards."""

    def keep(self, parts: Sequence[Tensor]) -> Rows:
        """Starts a copy of these rows of an output, one after the other, that stays on the device;
        the output may be overwritten afterwards."""

    def memory_bytes(self) -> int:
        """Device memory that this process holds, without what the driver keeps for it."""

    def used_bytes(self) -> int:
        """Device memory in use by everyone, the driver included."""

    def alive(self) -> bool:
        """False: no work can succeed here any more and the process must be replaced."""


@dataclass(frozen=True, slots=True)
class HostRows:
    """Rows that are there already."""

    rows: Tensor

    def wait(self) -> Tensor:
        """At once."""
        return self.rows


class CpuDevice:
    """Runs the forward on the static buffers where a GPU would replay a graph."""

    backend = "cpu"
    device = torch.device("cpu")

    def running(self) -> AbstractContextManager[object]:
        """Nothing to enter."""
        return nullcontext()

    def beside(self) -> Device:
        """Itself: nothing overlaps here."""
        return self

    def fork(self) -> None:
        """Nothing to order."""

    def join(self) -> None:
        """Nothing to order."""

    def inputs(self, shapes: Shapes) -> Inputs:
        """See Device."""
        return HostInputs(*allocate(shapes, self.device))

    def host_buffer(self, size_bytes: int) -> Tensor:
        """See Device."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def capture(
        self, run: Callable[[], Tensor], *, kept: bool, tuned: bool
    ) -> Callable[[], Tensor]:
        """The function itself, after one warm-up."""
        run()
        return run

    def read_back(self, rows: Tensor) -> Rows:
        """A copy: the rows may be a view of something that is written again."""
        return HostRows(rows.clone())

    def keep(self, parts: Sequence[Tensor]) -> Rows:
        """See Device: the host is the device."""
        return HostRows(torch.cat(list(parts)))

    def memory_bytes(self) -> int:
        """Not counted on the CPU."""
        return 0

    def used_bytes(self) -> int:
        """Not counted on the CPU."""
        return 0

    def alive(self) -> bool:
        """Always."""
        return True
