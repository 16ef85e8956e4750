"""On a GPU: a pack is staged while the one before replays, and no graph reads another's inputs."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any, cast

import pytest
import torch

from actors.engine.budgets import Capacity, Segments
from actors.engine.device import Device
from actors.engine.engine import Engine
from actors.engine.graphs import GraphSet, capture
from actors.kernels.attention import Values
from actors.rows.lending import Lender
from actors.telemetry.metrics import EncoderMetrics
from tests.gpu.towers import cuda
from tests.toy_tower import ToyTower, toy_item, toy_rows

pytestmark = pytest.mark.gpu

SLOW_CYCLES = 2_000_000
"""About a millisecond: the next pack is staged meanwhile."""

BUDGETS = (64, 256, 1024)


class SlowToy(ToyTower):
    """Reads metadata and patches when the replay has gone on for a while, and never on the host.

    A row is as the toy's, and more by all the metadata together: the patches of the pack.
    """

    def forward(self, path: str, values: Values) -> torch.Tensor:
        torch.cuda._sleep(SLOW_CYCLES)
        return values["patches"].float().sum(1).view(-1, 4) + values["items"].sum()


class QuietToy(ToyTower):
    """The toy without its check, which the host would wait for."""

    def forward(self, path: str, values: Values) -> torch.Tensor:
        return values["patches"].float().sum(1).view(-1, 4)


@pytest.fixture
def device() -> Device:
    return cuda()


def test_packs_from_the_host_keep_their_inputs(device: Device) -> None:
    limits = Capacity((BUDGETS,), (BUDGETS[-1],), items=1, frames=0)
    tower, metrics, random = SlowToy(), EncoderMetrics(), Random(0)
    engine = Engine(tower, capture(tower, limits, device, metrics), limits, device, metrics)
    items = [toy_item(random.randint(1, 1024), seed) for seed in range(200)]
    answers = [engine.submit(item) for item in items]
    for item, answer in zip(items, answers, strict=True):
        assert torch.equal(answer.result(60).rows, toy_rows(item) + item.plan.patches)
    engine.close()


def test_packs_of_items_from_host_and_device(device: Device) -> None:
    limits = Capacity((BUDGETS,), (BUDGETS[-1],), items=32, frames=0)
    tower, metrics, random = QuietToy(), EncoderMetrics(), Random(0)
    engine = Engine(tower, capture(tower, limits, device, metrics), limits, device, metrics)
    items = [toy_item(random.randint(1, 200), seed) for seed in range(400)]
    placed = [
        replace(item, patches=cast(Any, torch.from_numpy(item.patches).to(device.device)))
        if random.random() < 0.5
        else item
        for item in items
    ]
    torch.cuda.synchronize()
    answers = [engine.submit(item) for item in placed]
    for item, answer in zip(items, answers, strict=True):
        assert torch.equal(answer.result(60).rows, toy_rows(item))
    engine.close()


def test_rows_of_one_pack_leave_in_fp8_and_as_they_are(device: Device) -> None:
    limits = Capacity((BUDGETS,), (BUDGETS[-1],), items=32, frames=0)
    tower, metrics, random = QuietToy(), EncoderMetrics(), Random(0)
    engine = Engine(tower, capture(tower, limits, device, metrics), limits, device, metrics)
    items = [toy_item(random.randint(1, 200), seed) for seed in range(400)]
    for item in items:
        item.in_fp8 = random.random() < 0.5
    answers = [engine.submit(item) for item in items]
    for item, answer in zip(items, answers, strict=True):
        rows = answer.result(60).rows
        if not item.in_fp8:
            assert torch.equal(rows, toy_rows(item))
            continue
        assert rows.values.device.type == rows.scales.device.type == "cpu"
        torch.testing.assert_close(rows.float(), toy_rows(item), rtol=2**-4, atol=1e-3)
    engine.close()


def test_packs_on_the_device_keep_their_inputs(device: Device) -> None:
    tower, random = SlowToy(), Random(1)
    graphs = GraphSet(tower, "default", BUDGETS, Segments(32), device)
    graphs.capture(lambda budget, seconds: None)
    packs = []
    for seed in range(100):
        items = [toy_item(random.randint(1, 50), 100 * seed + n) for n in range(20)]
        rows = torch.cat([toy_rows(item) for item in items])
        packs.append((items, rows + sum(item.plan.patches for item in items)))
    placed = [
        [torch.from_numpy(item.patches).to(device.device) for item in items] for items, _ in packs
    ]
    torch.cuda.synchronize()
    found = []
    for (items, rows), patches in zip(packs, placed, strict=True):
        budget = 256 if len(rows) <= 256 else 1024
        made = graphs.encode(budget, [item.plan for item in items], patches)
        with device.running():
            found.append(made.clone())
    torch.cuda.synchronize()
    for (_, rows), made in zip(packs, found, strict=True):
        assert torch.equal(made.cpu(), rows)


def test_graphs_share_the_memory_of_their_outputs(device: Device) -> None:
    tower = SlowToy()
    sizes = []
    for budgets in ((2**20,), tuple(2**20 - 2**14 * n for n in reversed(range(16)))):
        torch.cuda.empty_cache()
        before = device.memory_bytes()
        graphs = GraphSet(tower, "default", budgets, Segments(32), device.beside())
        graphs.capture(lambda budget, seconds: None)
        sizes.append(device.memory_bytes() - before)
    one, sixteen = sizes
    assert sixteen < 1.5 * one


def test_rows_are_read_back_into_memory_that_is_lent(device: Device) -> None:
    """Without waiting for the copy, and into memory of their own if there is no room."""
    lender = Lender(2**20)
    device.lend(lender)
    rows = torch.randn(100, 64, device=device.device, dtype=torch.bfloat16)
    with device.running():
        torch.cuda._sleep(100 * SLOW_CYCLES)
        read = device.read_back(rows, [40, 60])
        started = not torch.cuda.current_stream().query()
    assert started, "the call did not wait"
    found = read()
    assert torch.equal(torch.cat(list(found)), rows.cpu())
    assert all(lender.holds(one.view(torch.uint8).numpy().reshape(-1)) for one in found)
    with device.running():
        large = torch.randn(2**20, device=device.device)
        read = device.read_back(large, [len(large)])
    assert torch.equal(read()[0], large.cpu())
    del found
    assert lender.taken_bytes == 0
