"""The GPU. Three streams let the staging, replay and readback of successive packs overlap.

staging stream    patches, host -> staging buffers, while the previous pack replays
compute stream    staging buffers, metadata -> static inputs; replay; output -> readback buffer
readback stream   readback buffer -> pinned host memory, while the next pack replays
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import TypeVar

import torch
from torch import Tensor

from actors.allocator import groups
from actors.engine.device import Copies, Device, Inputs, MediaRows, copy_rows, count
from actors.engine.slices import Pace, Slice, Step, took_together
from actors.errors import StartError
from actors.kernels import Shapes
from actors.kernels.break_points import at_break_points, between
from actors.kernels.gemm.gemm import tuning
from actors.rows.lending import Lender
from actors.rows.memory import pin

Copied = TypeVar("Copied")


class StagedInputs(Inputs):
    """Static inputs, and staging buffers for media from the host.

    A pack may have media on the host and on the device. Nothing here waits for the device, and
    nothing is overwritten before it has been read:
    - Host memory: metadata is never written to again. Patches are gathered in pinned memory, which
      torch reuses only after the copies that read it have finished.
    - Staging buffers: overwritten after the previous pack has been copied from them to the inputs
      (`consumed`), which is before its replay starts. So one set of buffers is enough.
    - Static inputs: only the compute stream writes them, between the replays that read them.
    Media on the device are copied directly into the inputs, on the compute stream. They must be
    complete before the call, and must stay valid until the pack's rows have been read, or with a
    pace, until the compute stream has read the media (`record_stream`).
    """

    def __init__(self, shapes: Shapes, device: CudaDevice) -> None:
        super().__init__(shapes, device.device)
        torch.cuda.synchronize()
        self.buffers = {name: torch.empty_like(tensor) for name, tensor in self.tensors.items()}
        self.compute = device.compute
        self.staging = device.staging
        self.consumed = torch.cuda.Event()

    def stage(self, metadata: Tensor, rows: MediaRows) -> None:
        """The compute stream must be the current one."""
        host = {name: [part for part in parts if not part.is_cuda] for name, parts in rows.items()}
        if any(host.values()):
            self.staging.wait_event(self.consumed)
            with torch.cuda.stream(self.staging):
                for name, hosted in host.items():
                    if hosted:
                        buffer = self.buffers[name][: count(hosted)]
                        buffer.copy_(pinned(hosted), non_blocking=True)
            self.compute.wait_stream(self.staging)
        for name, parts in rows.items():
            whole = merged(parts, self.buffers[name][: count(host[name])])
            copy_rows(whole, self.tensors[name][: count(parts)])
        self.consumed.record(self.compute)
        self.metadata[: len(metadata)].copy_(metadata, non_blocking=True)


class CudaPace(Pace):
    """Steps of the language model run on the stream that is current where `step` is called."""

    def __init__(self, slice_seconds: float, compute: torch.cuda.Stream) -> None:
        super().__init__(slice_seconds)
        self.compute = compute
        self.steps: torch.cuda.Stream | None = None  # unknown before the first
        self._begun: tuple[Step, torch.cuda.Event] | None = None
        self._slices_begin: torch.cuda.Event | None = None
        self._timed = deque[tuple[Callable[[float], None], torch.cuda.Event, torch.cuda.Event]]()
        self._last_begins: torch.cuda.Event | None = None

    def idle(self) -> bool:
        """With a second slice launched, the device does not wait for the next check if slices take
        longer than POLL_SECONDS."""
        slices = self._last_begins is None or self._last_begins.query()
        return slices and (self.steps is None or self.steps.query())

    def _launch_first(self) -> Slice:
        self._last_begins = self.compute.record_event()
        return super()._launch_first()

    def step(self, step: Step) -> None:
        self.steps = torch.cuda.current_stream()
        super().step(step)

    def after_steps(self) -> None:
        if self.steps:
            self.compute.wait_stream(self.steps)
        self._slices_begin = timing(self.compute)

    def slices_launched(self, slices: Sequence[Slice]) -> None:
        """Times them, unless the device may have waited for their launch."""
        begin = self._slices_begin
        if begin and not begin.query():
            self._timed.append((partial(took_together, slices), begin, timing(self.compute)))

    def before_step(self, step: Step) -> None:
        assert self.steps
        if not self.compute.query():
            self.steps.wait_stream(self.compute)
        self._begun = step, timing(self.steps)

    def step_launched(self) -> None:
        """Times that step, unless it has ended already, because the device may be idle since."""
        begun, self._begun = self._begun, None
        if begun and self.steps and not self.steps.query():
            step, begin = begun
            self._timed.append((partial(self.times.add, step), begin, timing(self.steps)))
        while self._timed and self._timed[0][-1].query():
            measured, begin, end = self._timed.popleft()
            measured(begin.elapsed_time(end) / 1000)


def timing(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Records when the device gets here."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


class CudaDevice(Device):
    """One GPU, owned by this process."""

    backend = "cuda"
    measuring_seconds = 0.0

    def __init__(self, slice_seconds: float = 0) -> None:
        self.device = torch.device("cuda", 0)  # the only one that a replica can see
        self.name = torch.cuda.get_device_name(self.device)
        torch.cuda.set_device(self.device)
        self.compute = torch.cuda.Stream()
        self.staging = torch.cuda.Stream()
        self.reading = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()
        self._read_buffer = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._beside: list[CudaDevice] = []
        if slice_seconds:
            self.pace = CudaPace(slice_seconds, self.compute)

    def limit(self, size_bytes: int) -> None:
        total = torch.cuda.get_device_properties(self.device).total_memory
        if size_bytes > total:
            raise StartError(
                f"encoder.gpu_memory_bytes is {size_bytes}, and the GPU has {total}: lower it"
            )
        torch.cuda.set_per_process_memory_fraction(size_bytes / total, self.device)
        self.limit_bytes = size_bytes

    def running(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.compute)

    def beside(self) -> CudaDevice:
        """With its own streams and graph pool, because graphs of one pool must not overlap."""
        other = CudaDevice()
        other.pace = self.pace
        other.limit_bytes = self.limit_bytes
        self._beside.append(other)
        return other

    def fork(self) -> None:
        for other in self._beside:
            other.compute.wait_stream(self.compute)

    def join(self) -> None:
        """Outputs are read on this stream before the next fork lets replays overwrite them."""
        for other in self._beside:
            self.compute.wait_stream(other.compute)

    def inputs(self, shapes: Shapes) -> Inputs:
        return StagedInputs(shapes, self)

    def host_buffer(self, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def capture(
        self, run: Callable[[], Tensor], *, kept: bool, tuned: bool
    ) -> Callable[[], Tensor]:
        """Captures a CUDA graph in the pool that all graphs of this device share. With a pace, it
        captures a graph per slice: as many pieces of the pass as take at most `slice_seconds`.

        The memory of an output that is not kept returns to the pool, where graphs captured later
        reuse it. So all graphs together take as much memory as the largest one.
        """
        with tuning() if tuned else nullcontext():
            self.finished(run)
        pace, begins = self.pace, set[int]()
        if pace:
            begins = {first for first, *_ in groups(self.seconds_of(run), pace.slice_seconds)}
        torch.cuda.empty_cache()  # the pool cannot use what the warm-up allocated
        graphs, output = self.graphs_of(run, begins)
        if not kept:
            output = unowned(output)

        def replay_all() -> None:
            for graph in between(graphs):
                graph.replay()

        if pace is None:
            slices = []
        else:
            timed = zip(graphs, self.seconds_of(replay_all), strict=True)
            slices = [Slice(self.launcher(graph), seconds) for graph, seconds in timed]

        def replay() -> Tensor:
            if pace is None:
                graphs[0].replay()
            else:
                pace.launch(slices)
            return output

        return replay

    def launcher(self, graph: torch.cuda.CUDAGraph) -> Callable[[], None]:
        """The function that launches a graph, from any thread."""

        def launch() -> None:
            with torch.cuda.stream(self.compute):
                graph.replay()

        return launch

    def graphs_of(
        self, run: Callable[[], Tensor], begins: Container[int]
    ) -> tuple[list[torch.cuda.CUDAGraph], Tensor]:
        """Captures graphs that begin at these break points, and the output. Empty: one graph."""
        graphs: list[torch.cuda.CUDAGraph] = []
        reached = 0
        with ExitStack() as capturing:

            def begin() -> None:
                """Begins a graph, and ends the previous one."""
                capturing.close()
                graphs.append(torch.cuda.CUDAGraph())
                # thread_local: other threads may use CUDA while this thread captures.
                graph = torch.cuda.graph(
                    graphs[-1],
                    pool=self.pool,
                    stream=self.compute,
                    capture_error_mode="thread_local",
                )
                capturing.enter_context(graph)

            def reach() -> None:
                nonlocal reached
                reached += 1
                if reached in begins:
                    begin()

            begin()
            with at_break_points(reach) if begins else nullcontext():
                output = run().contiguous()
        return graphs, output

    def finished(self, run: Callable[[], Tensor]) -> None:
        """Runs eagerly and waits for completion."""
        with torch.cuda.stream(self.compute):
            run()
        self.compute.synchronize()

    def seconds_of(self, run: Callable[[], object]) -> list[float]:
        """Seconds of each piece between break points, over whatever the inputs hold."""
        events: list[torch.cuda.Event] = []

        def record() -> None:
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record()

        with torch.cuda.stream(self.compute), at_break_points(record):
            for _ in range(2):  # the first run is slower
                events.clear()
                record()
                run()
                record()
        self.compute.synchronize()
        return [a.elapsed_time(b) / 1000 for a, b in pairwise(events)]

    def lend(self, lender: Lender) -> None:
        memory = lender.shared.memory
        pin(memory.ctypes.data, memory.nbytes, self.device)
        super().lend(lender)

    def read_back(self, rows: Tensor, lengths: Sequence[int]) -> Copies:
        """Copies through a device buffer, so that the next replay does not wait for the copy to the
        host."""
        if self._read_buffer.nbytes < rows.nbytes:
            self.reading.synchronize()
            self._read_buffer = torch.empty(rows.nbytes, dtype=torch.uint8, device=self.device)
        buffer = self._read_buffer[: rows.nbytes].view(rows.dtype).view(rows.shape)
        self.compute.wait_stream(self.reading)
        with torch.cuda.stream(self.compute):
            buffer.copy_(rows, non_blocking=True)
        self.reading.wait_stream(self.compute)
        done = torch.cuda.Event()
        with torch.cuda.stream(self.reading):
            host = self.to_host(buffer, lengths)
            done.record(self.reading)
        return partial(copied, host, done)

    def keep(self, parts: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """The memory belongs to the compute stream, so uses on other streams must have finished
        before it is freed. With a pace, nothing waits for the copies, but the next step does."""
        with torch.cuda.stream(self.compute):
            kept = [part.clone() for part in parts]
            if self.pace:
                return lambda: kept
            done = self.compute.record_event()
        return partial(copied, kept, done)

    def memory_bytes(self) -> int:
        """Reserved by torch's allocator, graph pools included."""
        return torch.cuda.memory_reserved(self.device)

    def used_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def alive(self) -> bool:
        """Whether the CUDA context works: an illegal memory access breaks it for good."""
        try:
            torch.cuda.synchronize(self.device)  # allocates nothing, so low memory is no failure
        except RuntimeError:
            return False
        return True


def copied(rows: Copied, done: torch.cuda.Event) -> Copied:
    """Waits for the copy into `rows`. Blocks this thread only: the GIL is released meanwhile."""
    done.synchronize()
    return rows


def unowned(rows: Tensor) -> Tensor:
    """The same rows in the same memory of a graph's pool, without keeping it allocated."""
    described = {
        "shape": (rows.nbytes,),
        "typestr": "|u1",
        "data": (rows.data_ptr(), False),
        "version": 3,
    }
    memory = SimpleNamespace(__cuda_array_interface__=described)
    flat = torch.as_tensor(memory, device=rows.device)
    return flat.view(rows.dtype).view(rows.shape)


def merged(parts: Sequence[Tensor], staged: Tensor) -> Sequence[Tensor]:
    """The parts, with those on the host replaced by their staged rows."""
    if len(staged) == count(parts):
        return [staged]
    copies = iter(staged.split([len(part) for part in parts if not part.is_cuda]))
    return [part if part.is_cuda else next(copies) for part in parts]


def pinned(parts: Sequence[Tensor]) -> Tensor:
    shape = (count(parts), *parts[0].shape[1:])
    return copy_rows(parts, torch.empty(shape, dtype=parts[0].dtype, pin_memory=True))
