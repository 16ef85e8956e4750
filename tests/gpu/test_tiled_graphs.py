"""On a GPU, at full size: the tile families in every budget, poisoned, against float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor

from actors import spec
from actors.budgets import Segments, capacity
from actors.capture import capture
from actors.device import Device
from actors.graphs import GraphSet
from actors.metrics import EncoderMetrics
from actors.models import load
from actors.models.packed_tower import PackedTower
from actors.models.tiled import TileTower
from actors.options import GraphOptions, ModelOptions
from actors.types import Item, Size

pytestmark = pytest.mark.gpu

PRESETS = (
    *("internvl3-8b", "internvl3-78b", "llama4-scout", "gemma3-4b"),
    *("siglip-so400m", "clip-vit-l-336", "llava15-7b"),
)


@pytest.fixture(params=PRESETS)
def preset(request: pytest.FixtureRequest) -> Iterator[str]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    yield request.param
    torch.cuda.empty_cache()


def test_every_budget_equals_the_reference(preset: str) -> None:
    from actors.cuda import CudaDevice

    assert worst_error(preset, CudaDevice()) < 3e-2


def worst_error(preset: str, device: Device) -> float:
    """Relative, over all budgets and several packs of each, in bfloat16 against float32."""
    options = ModelOptions(id=preset, load_format="dummy", dtype="bfloat16")
    model = spec.read(options)
    weights = load.tensors(options, model, device.device)
    tower = load.build(model, weights, device.device)
    reference = load.build(replace(model, dtype="float32"), weights, device.device)
    assert isinstance(tower, TileTower | PackedTower)
    limits = capacity(GraphOptions(), tower.spec.sizing.token_range(), 0)
    (graphs,) = capture(tower, limits, device, EncoderMetrics()).values()
    eager = GraphSet(reference, "default", (), Segments(0), device)
    worst = 0.0
    for budget in graphs.budgets:
        for seed in range(3):
            graphs.inputs.tensors["patches"].random_(0, 256)
            synchronize(device)
            items = items_within(tower, budget, seed)
            rows = finished(graphs.run(budget, items), device)
            assert bool(rows.isfinite().all()), (budget, seed)
            exact = finished(eager.run(None, items), device)
            worst = max(worst, float((rows.float() - exact).norm() / exact.norm()))
    print(f"{preset}: worst relative error {worst:.1e}, budgets {graphs.budgets}")
    return worst


def items_within(tower: TileTower | PackedTower, budget: int, seed: int) -> list[Item]:
    """Items of mixed sizes with random pixels that together fit a budget, at least one."""
    random, generator = Random(seed), np.random.default_rng(seed)
    width = 3 * tower.sizing.patch_size**2
    plans = [tower.sizing.plan(Size(8, 8))]
    for _ in range(20):
        plan = tower.sizing.plan(Size(random.randint(50, 3000), random.randint(50, 3000)))
        if sum(other.tokens for other in plans) + plan.tokens <= budget:
            plans.append(plan)
    return [
        Item(plan, generator.integers(0, 256, (plan.patches, width), dtype=np.uint8))
        for plan in plans
    ]


def finished(rows: Tensor, device: Device) -> Tensor:
    """A copy, once the compute stream has written them: this thread is on another stream."""
    synchronize(device)
    return rows.clone()


def synchronize(device: Device) -> None:
    if device.device.type == "cuda":
        torch.cuda.synchronize()
