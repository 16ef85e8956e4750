"""On a GPU, with the extra `nixl`: rows go from one process' device to another's, past the host."""

from __future__ import annotations

import asyncio
from random import Random
from time import perf_counter

import pytest
import ray
import torch
from torch import Tensor

from actors.engine.budgets import Capacity
from actors.engine.engine import Engine
from actors.engine.graphs import capture
from actors.kernels.attention import Values
from actors.store.writer import tensor
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Embedding, ReceivedBytes, Timings
from tests.gpu.towers import cuda
from tests.toy_tower import ToyTower, toy_item, toy_rows

pytestmark = pytest.mark.gpu

SHAPE = (2040, 16384)
"""Of a 1080p image by Qwen3-VL-8B: 67 MB."""
ITEMS = 20
NOTHING = Timings(0, 0, 0)


class CapturableTower(ToyTower):
    """The toy without its look for poison, which would wait for the device."""

    def forward(self, path: str, values: Values) -> Tensor:
        return values["patches"].float().sum(1).view(-1, 4)


def test_rows_that_stay_are_on_the_device_and_their_own() -> None:
    limits = Capacity(((64, 256),), (256,), items=8, frames=0)
    tower, device, metrics, random = CapturableTower(), cuda(), EncoderMetrics(), Random(0)
    graphs = capture(tower, limits, device, metrics)
    engine = Engine(tower, graphs, limits, device, metrics)
    items = [toy_item(random.randint(1, 80), seed) for seed in range(200)]
    for seed, item in enumerate(items):
        item.on_device = seed % 3 > 0
    answers = [engine.submit(item) for item in items]
    for seed, (item, answer) in enumerate(zip(items, answers, strict=True)):
        rows = answer.result(60).rows
        assert rows.is_cuda == (seed % 3 > 0)
        assert torch.equal(rows.cpu(), toy_rows(item))
    engine.close()


class Source:
    """In the place of an encoder."""

    def __init__(self) -> None:
        from actors.store.nixl import DeviceMemory

        self.metrics = EncoderMetrics()
        self.memory = DeviceMemory(2**28, torch.device("cuda", 0), self.metrics)

    def encode(self, number: int) -> Embedding:
        rows = torch.full(SHAPE, number, dtype=torch.float32, device="cuda")
        rows += torch.arange(SHAPE[1], device="cuda") % 64
        torch.cuda.synchronize()  # as `Rows.wait` does
        data = self.memory.put(rows, torch.bfloat16)
        assert data
        return Embedding(data, "bfloat16", SHAPE, (1, 2, 2), "graph", NOTHING)

    def taken_bytes(self) -> float:
        return self.metrics.registry.get_sample_value("encoder_nixl_bytes") or 0.0


class Consumer:
    """In the place of a language model."""

    def __init__(self) -> None:
        from actors.store.nixl import Receiver

        self.reader = Receiver("cuda")

    def take(self, embedding: Embedding, number: int) -> float:
        """Seconds until its rows are here, and right."""
        since = perf_counter()
        received = asyncio.run(self.reader.here(embedding))
        seconds = perf_counter() - since
        assert isinstance(received.data, ReceivedBytes)
        rows = tensor(received)
        assert rows.is_cuda
        row = (torch.arange(SHAPE[1], device="cuda") % 64 + number).bfloat16()
        assert bool((rows == row).all())
        return seconds


def test_a_consumer_has_rows_from_the_device() -> None:
    """More items than there is room for, one after the other. Two GPUs are used if there are."""
    pytest.importorskip("nixl")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    share = 1 if torch.cuda.device_count() > 1 else 0.4
    ray.init(address="local", include_dashboard=False, num_cpus=4)
    try:
        source = ray.remote(num_gpus=share)(Source).remote()
        consumer = ray.remote(num_gpus=share)(Consumer).remote()
        seconds = []
        for number in range(ITEMS):
            (embedding,) = ray.get([source.encode.remote(number)])
            seconds.append(ray.get(consumer.take.remote(embedding, number)))
            del embedding
        size = SHAPE[0] * SHAPE[1] * 2
        best = min(seconds)
        print(f"{size} bytes: {best * 1e3:.2f} ms at best, {size / best / 1e9:.1f} GB/s")
        print("ms of each:", [round(one * 1e3, 2) for one in seconds])
        deadline = perf_counter() + 20
        while ray.get(source.taken_bytes.remote()) and perf_counter() < deadline:
            pass
        assert ray.get(source.taken_bytes.remote()) == 0
    finally:
        ray.shutdown()
