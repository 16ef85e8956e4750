"""On a GPU: a context that is lost for ever, and too little memory at capture and at replay."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from actors.engine.budgets import Capacity
from actors.engine.engine import Engine
from actors.engine.graphs import capture
from actors.errors import EncodeFailed, StartError
from actors.telemetry.metrics import EncoderMetrics
from tests.gpu.conftest import Captured
from tests.gpu.test_graphs import item
from tests.gpu.towers import cuda
from tests.toy_tower import ToyTower

pytestmark = pytest.mark.gpu

LOST = 70
"""The status that engine.py ends its process with."""

ASSERTS = """
import torch
from actors.engine.budgets import Capacity
from actors.engine.graphs import capture
from actors.engine.cuda import CudaDevice
from actors.engine.engine import Engine
from actors.telemetry.metrics import EncoderMetrics
from tests.toy_tower import ToyTower, toy_item

tower, device, metrics = ToyTower(), CudaDevice(), EncoderMetrics()
limits = Capacity(((),), (64,), items=8, frames=0)
engine = Engine(tower, capture(tower, limits, device, metrics), limits, device, metrics)
assert engine.submit(toy_item(4, 1)).result(60).source == "eager"
beyond = torch.tensor([5], device="cuda")
tower.forward = lambda path, values: torch.zeros(4, device="cuda")[beyond].view(1, 1)
engine.submit(toy_item(4, 2)).result(60)
"""


def test_a_lost_context_ends_the_process() -> None:
    cuda()
    ended = subprocess.run(
        [sys.executable, "-c", ASSERTS], capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.returncode == LOST, ended.stderr


@contextmanager
def memory_left(size_bytes: int) -> Iterator[None]:
    """This process may have so much of the GPU beside what it holds, and no more."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    part = (torch.cuda.memory_reserved() + size_bytes) / total
    torch.cuda.set_per_process_memory_fraction(part)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


def test_too_little_memory_for_the_graphs_names_what_to_change() -> None:
    device = cuda()
    large = Capacity(((2**24,),), (2**24,), items=8, frames=0)
    with (
        memory_left(2**26),
        pytest.raises(StartError, match=r"graphs\.token_budgets"),
    ):
        capture(ToyTower(), large, device, EncoderMetrics())
    assert device.alive()


def test_a_limit_is_kept_and_named() -> None:
    device = cuda()
    large = Capacity(((2**24,),), (2**24,), items=8, frames=0)
    total = torch.cuda.get_device_properties(0).total_memory
    with pytest.raises(StartError, match=rf"gpu_memory_bytes is {total + 1}.*lower it"):
        device.limit(total + 1)
    most = torch.cuda.memory_reserved() + 2**26
    try:
        device.limit(most)
        with pytest.raises(StartError, match=rf"raise encoder\.gpu_memory_bytes, which is {most}"):
            capture(ToyTower(), large, device, EncoderMetrics())
        assert device.memory_bytes() <= most
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        device.limit_bytes = None


def test_too_little_memory_for_an_item_fails_it_alone(captured: Captured) -> None:
    metrics = EncoderMetrics()
    engine = Engine(captured.tower, captured.graphs, captured.capacity, captured.device, metrics)
    side = int(captured.capacity.budgets[0][-1] ** 0.5) + 8  # beyond every budget: eager
    try:
        with memory_left(2**26):
            large, small = engine.submit(item(side, side, 1)), engine.submit(item(4, 4, 2))
            with pytest.raises(EncodeFailed, match="out of memory"):
                large.result(60)
            assert small.result(60).source == "graph"
        assert engine.submit(item(side, side, 3)).result(60).source == "eager"
    finally:
        engine.close()
