"""What differs between a GPU and a machine without one: streams, capture, copies. No more.

Both devices have the same verbs, so that packing, padding, staging and post-processing are the same
code everywhere. All verbs but `Rows.wait` are called from one thread, the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from actors.attention import Shapes

Values = Mapping[str, Sequence[Tensor]]
"""Host tensors by the input they fill; several of one input follow each other, row after row."""


class Rows(Protocol):
    """An output on its way to the host."""

    def wait(self) -> Tensor:
        """The rows in host memory that nobody else will write to. Blocks until they are there."""


class Inputs(Protocol):
    """The static inputs of a path: allocated once, written pack after pack."""

    tensors: dict[str, Tensor]

    def stage(self, values: Values) -> None:
        """Copies the values into the first rows of the inputs, ahead of what runs next.

        Rows beyond them keep what they held: a replay writes only what changed.
        """


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

    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Runs once to warm up, records, and gives the replay.

        Its result is overwritten by later replays of this graph, and of those captured before it.
        """

    def read_back(self, rows: Tensor) -> Rows:
        """Starts the copy of an output to the host; the output may be overwritten afterwards."""

    def memory_bytes(self) -> int:
        """Device memory that this process holds."""

    def alive(self) -> bool:
        """False: no work can succeed here any more and the process must be replaced."""


@dataclass(frozen=True, slots=True)
class HostRows:
    """Rows that are there already."""

    rows: Tensor

    def wait(self) -> Tensor:
        """At once."""
        return self.rows


class HostInputs:
    """Static inputs that the forward reads in place."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def stage(self, values: Values) -> None:
        """See Inputs."""
        for name, parts in values.items():
            fill(self.tensors[name], parts)


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
        return HostInputs(allocate(shapes, self.device))

    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """The function itself, after one warm-up."""
        run()
        return run

    def read_back(self, rows: Tensor) -> Rows:
        """A copy: the rows may be a view of something that is written again."""
        return HostRows(rows.clone())

    def memory_bytes(self) -> int:
        """Not counted on the CPU."""
        return 0

    def alive(self) -> bool:
        """Always."""
        return True


def allocate(shapes: Shapes, device: torch.device) -> dict[str, Tensor]:
    """Zeros: every index and position in a fresh buffer is a valid one."""
    return {
        name: torch.zeros(shape, dtype=dtype, device=device)
        for name, (shape, dtype) in shapes.items()
    }


def fill(target: Tensor, parts: Sequence[Tensor]) -> None:
    """Copies the parts into the first rows of the target, one after the other."""
    start = 0
    for part in parts:
        target[start : start + len(part)].copy_(part, non_blocking=True)
        start += len(part)
