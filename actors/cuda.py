"""The GPU: three streams, so that staging, replay and reading back overlap from pack to pack.

staging stream    host -> staging buffers, while the pack before it replays
compute stream    staging buffers -> static inputs, replay, output -> read-back buffer
read-back stream  read-back buffer -> pinned host memory, while the next pack replays
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.attention import Shapes
from actors.device import Inputs, Rows, Values, allocate, fill


@dataclass(frozen=True, slots=True)
class PinnedRows:
    """Rows whose copy to pinned memory has been started."""

    rows: Tensor
    done: torch.cuda.Event

    def wait(self) -> Tensor:
        """Blocks this thread only: the interpreter lock is free meanwhile."""
        self.done.synchronize()
        return self.rows


class StagedInputs:
    """Static inputs behind staging buffers of the same size.

    One set of staging buffers is enough: their rows are copied on before the replay begins, so the
    next pack may overwrite them while this one replays.
    """

    def __init__(
        self, tensors: dict[str, Tensor], compute: torch.cuda.Stream, staging: torch.cuda.Stream
    ) -> None:
        self.tensors = tensors
        self.buffers = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
        self.compute = compute
        self.staging = staging
        self.consumed = torch.cuda.Event()

    def stage(self, values: Values) -> None:
        """Host to staging buffer while the last pack still replays, then into the inputs."""
        self.staging.wait_event(self.consumed)
        with torch.cuda.stream(self.staging):
            for name, parts in values.items():
                fill(self.buffers[name], parts)
        self.compute.wait_stream(self.staging)
        with torch.cuda.stream(self.compute):
            for name, parts in values.items():
                rows = sum(map(len, parts))
                self.tensors[name][:rows].copy_(self.buffers[name][:rows], non_blocking=True)
            self.consumed.record(self.compute)


class CudaDevice:
    """One GPU, owned by this process."""

    backend = "cuda"

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)  # Ray shows a replica no other
        torch.cuda.set_device(self.device)
        self.compute = torch.cuda.Stream()
        self.staging = torch.cuda.Stream()
        self.reading = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()
        self._read_buffer = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._beside: list[CudaDevice] = []

    def running(self) -> AbstractContextManager[object]:
        """The compute stream."""
        return torch.cuda.stream(self.compute)

    def beside(self) -> CudaDevice:
        """Streams of its own, and a pool: graphs that share one may not run at the same time."""
        other = CudaDevice()
        self._beside.append(other)
        return other

    def fork(self) -> None:
        """See Device."""
        for other in self._beside:
            other.compute.wait_stream(self.compute)

    def join(self) -> None:
        """See Device. A path's output is read here, before the next fork lets it be rewritten."""
        for other in self._beside:
            self.compute.wait_stream(other.compute)

    def inputs(self, shapes: Shapes) -> Inputs:
        """See Device."""
        tensors = allocate(shapes, self.device)
        torch.cuda.synchronize()
        return StagedInputs(tensors, self.compute, self.staging)

    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """A CUDA graph in the pool that all graphs of this device share."""
        with torch.cuda.stream(self.compute):
            run()
        self.compute.synchronize()
        torch.cuda.empty_cache()  # what the warm-up took is not the pool's: give it back
        graph = torch.cuda.CUDAGraph()
        # thread_local: decoding threads may go on using CUDA while this thread captures.
        with torch.cuda.graph(
            graph, pool=self.pool, stream=self.compute, capture_error_mode="thread_local"
        ):
            output = run()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay

    def read_back(self, rows: Tensor) -> Rows:
        """Into a buffer of our own at once, so that the next replay need not wait for the host."""
        if self._read_buffer.nbytes < rows.nbytes:
            self.reading.synchronize()
            self._read_buffer = torch.empty(rows.nbytes, dtype=torch.uint8, device=self.device)
        buffer = self._read_buffer[: rows.nbytes].view(rows.dtype).view(rows.shape)
        host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
        self.compute.wait_stream(self.reading)
        with torch.cuda.stream(self.compute):
            buffer.copy_(rows, non_blocking=True)
        self.reading.wait_stream(self.compute)
        done = torch.cuda.Event()
        with torch.cuda.stream(self.reading):
            host.copy_(buffer, non_blocking=True)
            done.record(self.reading)
        return PinnedRows(host, done)

    def memory_bytes(self) -> int:
        """What torch's allocator holds, graph pools included."""
        return torch.cuda.memory_reserved(self.device)

    def alive(self) -> bool:
        """Whether the context still takes work: an illegal access or an assertion is for ever."""
        try:
            torch.cuda.synchronize(self.device)  # allocates nothing: being out of memory passes
        except RuntimeError:
            return False
        return True
