"""On a GPU: rows that one process keeps for ids reach the device of another, as in vLLM's workers.

    python3 -m pytest -m gpu -s tests/gpu/test_places.py

Imports neither Ray nor vLLM. Prints how long an embedding of 67 MB takes, from when it is asked for
until it is complete on the device.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.rows.memory import BlockMemory, OpenedShared
from actors.rows.protocol import RowsPlace
from actors.rows.reader import RowsReader
from encoder_service.engines.vllm_rows import OPEN, RECEIVED, RowLoader, RowsAt, board_of, column
from tests.unit.rows.kept import Dictionary, serving

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SHAPE, DTYPE = (2040, 16384), "bfloat16"
"""Of a 1080p image by Qwen3-VL-8B: 67 MB."""
SIZE_BYTES = 2 * SHAPE[0] * SHAPE[1]
ITEMS, ROUNDS = 4, 6
MEMORY_BYTES = 6 * SIZE_BYTES
GOAL_MS = {"same GPU": 2.0, "other GPU": 5.0}
SPAWN = multiprocessing.get_context("spawn")
CASES = {
    # GPUs that each process sees: the one that keeps the rows, and the one that reads them.
    "same GPU": ("0", "0"),
    "other GPU": ("0,1", "1,0"),
    "other GPU, each process sees its own": ("0", "1"),
}


def pattern(seed: int, device: str) -> Tensor:
    """Rows whose bits differ everywhere."""
    numbers = torch.arange(SIZE_BYTES // 4, dtype=torch.int32, device=device)
    return (numbers * 2654435 + seed * 97).view(torch.bfloat16).view(SHAPE)


def keep(visible: str, folder: str, told: Connection) -> None:
    """The process of an encoder. Ends when it is told anything."""
    os.environ["CUDA_VISIBLE_DEVICES"] = visible
    device = torch.device("cuda", 0)
    memory = BlockMemory.on_gpu(MEMORY_BYTES, device)
    assert memory.handle, "CUDA shares it"
    store = Dictionary(memory)
    # Every other one from the host, as the rows of a cache.
    names = [store.keep(pattern(seed, ("cuda:0", "cpu")[seed % 2])) for seed in range(ITEMS)]
    assert store.blocks.keys() == set(names)
    with serving(store, Path(folder)) as (_, place):
        told.send((place, names, memory.handle.check))
        told.recv()


@contextmanager
def keeping(visible: str, folder: Path) -> Iterator[tuple[Any, RowsPlace, list[str], str]]:
    folder.mkdir(exist_ok=True)
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=keep, args=(visible, str(folder), theirs))
    process.start()
    theirs.close()
    try:
        assert ours.poll(120), "the keeper does not start"
        yield process, *ours.recv()
    finally:
        if process.is_alive():
            ours.send("end")
        process.join(60)
        process.kill()


def other_process(visible: str, work: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a process of its own."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=run, args=(visible, theirs, work, *arguments))
    process.start()
    theirs.close()
    found = ours.recv()
    process.join(60)
    if isinstance(found, BaseException):
        raise found
    return found


def run(visible: str, told: Connection, work: Callable[..., Any], *arguments: Any) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = visible
    try:
        told.send(work(*arguments))
    except BaseException as error:
        told.send(RuntimeError(repr(error)))
        raise


class Consumer:
    """The worker's half of the connector, and a memory that receives bytes."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        torch.zeros(1, device=self.device)  # before that, torch takes no memory for pinned
        self.received = BlockMemory.shared(2 * SIZE_BYTES)
        self.loader = RowLoader(0, self.device, torch.bfloat16)
        assert self.received.handle
        self.memories = {RECEIVED: self.received.handle}
        self.loader.follow(self.memories)
        opened = self.loader.opened[RECEIVED]
        assert isinstance(opened, OpenedShared)
        end = time.monotonic() + 60
        while not opened.memory.is_pinned():  # in a thread
            assert time.monotonic() < end
            time.sleep(0.01)

    def mapped(self, reader: RowsReader, name: str) -> Tensor:
        held = reader.hold(name)
        assert held.memory
        if 1 not in self.memories:
            self.memories[1] = held.memory
            self.loader.follow(self.memories)
            assert board_of(self.received.header)[0, column(1)] == OPEN
        return self.loader.load(RowsAt(1, held.offset, held.shape, held.dtype))

    def received_bytes(self, reader: RowsReader, name: str) -> Tensor:
        held = reader.hold(name)
        block = self.received.take(SIZE_BYTES)
        assert block is not None
        reader.read(name, block.numpy().data)
        place = RowsAt(RECEIVED, self.received.offset(block), held.shape, held.dtype)
        rows = self.loader.load(place)
        torch.cuda.synchronize()  # before the block is given back
        return rows


def measure(place: RowsPlace, names: list[str], how: str) -> list[float]:
    """Milliseconds from asking to rows complete on the device; the first of them comes first."""
    consumer = Consumer()
    reader = RowsReader.connect(place)
    assert reader
    load = getattr(consumer, how)
    taken = []
    for number in range(ITEMS * ROUNDS):
        seed = number % ITEMS
        torch.cuda.synchronize()
        began = time.perf_counter()
        rows = load(reader, names[seed])
        torch.cuda.synchronize()
        taken.append(1e3 * (time.perf_counter() - began))
        reader.free(names[seed])
        expected = pattern(seed, "cuda:0")
        assert torch.equal(rows.view(torch.int16), expected.view(torch.int16)), f"row of {seed}"
        del rows, expected
    reader.close()
    consumer.loader.follow({})
    assert not {"ray", "vllm"} & sys.modules.keys()
    return taken


def show(what: str, taken: list[float]) -> None:
    first, *rest = taken
    print(
        f"  {what:55} p50 {statistics.median(rest):7.2f}  max {max(rest):7.2f}  first {first:7.2f}"
    )


@pytest.mark.alone
@pytest.mark.parametrize("case", CASES)
def test_rows_are_copied_from_another_process(case: str, tmp_path: Path) -> None:
    keeper, consumer = CASES[case]
    if torch.cuda.device_count() < (1 if case == "same GPU" else 2):
        pytest.skip("needs two GPUs" if torch.cuda.is_available() else "no CUDA device")
    with keeping(keeper, tmp_path / "rows") as (_, place, names, uuid):
        print(f"\n67 MB in the consumer's device memory, ms; {case} ({uuid})")
        taken = other_process(consumer, measure, place, names, "mapped")
        show("CUDA IPC", taken)
        assert statistics.median(taken[1:]) <= GOAL_MS[case.partition(",")[0]]
        if case != "same GPU":
            return
        show(
            "unix socket, pinned memory",
            other_process(consumer, measure, place, names, "received_bytes"),
        )
        far = replace(place, unix="/nowhere")
        show("TCP, pinned memory", other_process(consumer, measure, far, names, "received_bytes"))


def outlive(place: RowsPlace, names: list[str], pid: int) -> str:
    """Copies from the memory of a process that is killed meanwhile."""
    consumer = Consumer()
    reader = RowsReader.connect(place)
    assert reader
    held = reader.hold(names[0])
    consumer.mapped(reader, names[0])
    torch.cuda.synchronize()
    os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + 20
    while reader.alive:
        assert time.monotonic() < end, "the death is seen at once"
        time.sleep(0.001)
    time.sleep(1)
    try:
        rows = consumer.loader.load(RowsAt(1, held.offset, held.shape, held.dtype))
        torch.cuda.synchronize()
    except RuntimeError as error:
        found = f"fails: {error}"
    else:
        same = torch.equal(rows.view(torch.int16), pattern(0, "cuda:0").view(torch.int16))
        found = f"gives {'the same' if same else 'other'} rows"
    consumer.loader.follow({})
    assert torch.ones(8, device="cuda:0").sum().item() == 8, "this process goes on"
    return found


def test_a_consumer_outlives_the_process_whose_memory_it_opened(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    with keeping("0", tmp_path / "rows") as (process, place, names, _):
        found = other_process("0", outlive, place, names, process.pid)
    print(f"\na copy from the memory of a process that was killed {found}")
    assert found == "gives the same rows"
