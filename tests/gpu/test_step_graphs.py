"""On a GPU, at full size: the Step3 towers in every budget of both paths, poisoned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch

from actors import spec
from actors.budgets import Segments
from actors.capture import capture
from actors.device import Device
from actors.graphs import GraphSet
from actors.metrics import EncoderMetrics
from actors.models import load
from actors.models.step_tower import StepTower
from actors.options import GraphOptions, ModelOptions
from actors.two_paths import PATHS, model_capacity
from actors.types import Item, ItemPlan, Size
from actors.windows import WindowSizing
from tests.gpu.test_tiled_graphs import finished, synchronize

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["step3vl-10b", "step3-321b"])
def options(request: pytest.FixtureRequest) -> Iterator[ModelOptions]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    yield ModelOptions(id=request.param, load_format="dummy")
    torch.cuda.empty_cache()


def test_every_budget_equals_the_reference(options: ModelOptions) -> None:
    from actors.cuda import CudaDevice

    assert worst_error(options, CudaDevice()) < 3e-2


def worst_error(options: ModelOptions, device: Device) -> float:
    """Relative, over all budgets of both paths, in bfloat16 against float32."""
    model = spec.read(options)
    weights = load.tensors(options, model, device.device)
    tower = load.build(model, weights, device.device)
    reference = load.build(replace(model, dtype="float32"), weights, device.device)
    assert isinstance(tower, StepTower)
    limits = model_capacity(GraphOptions(), model)
    worst = 0.0
    for path, graphs in capture(tower, limits, device, EncoderMetrics()).items():
        eager = GraphSet(reference, path, (), Segments(0), device)
        for seed, budget in enumerate(graphs.budgets):
            graphs.inputs.tensors["patches"].random_(0, 256)
            synchronize(device)
            items = items_within(tower, path, budget, seed)
            rows = finished(graphs.run(budget, items), device)
            assert bool(rows.isfinite().all()), (path, budget)
            exact = finished(eager.run(None, items), device)
            worst = max(worst, float((rows.float() - exact).norm() / exact.norm()))
    print(f"{options.id}: worst relative error {worst:.1e}, budgets {limits.budgets}")
    return worst


def items_within(tower: StepTower, path: str, budget: int, seed: int) -> list[Item]:
    """Items of mixed sizes with random pixels that together fit a budget of a path."""
    random, generator = Random(seed), np.random.default_rng(seed)
    sizing, index = tower.sizing, PATHS.index(path)
    most = 2 * sizing.image_pixels
    plans = [one_of_each(sizing.plan(Size(99, 99)), sizing)]
    for _ in range(20):
        plan = sizing.plan(Size(random.randint(50, most), random.randint(50, most)))
        if sum(other.path_tokens[index] for other in (*plans, plan)) <= budget:
            plans.append(plan)
    width = 3 * sizing.patch_size**2
    return [
        Item(plan, generator.integers(0, 256, (plan.patches, width), dtype=np.uint8))
        for plan in plans
    ]


def one_of_each(plan: ItemPlan, sizing: WindowSizing) -> ItemPlan:
    """The smallest item that has something on both paths: no image gives it, the towers take it."""
    whole, crop = (side**2 for side in sizing.side_patches)
    tokens = sizing.view_tokens
    return replace(
        plan,
        patches=whole + crop,
        tokens=sum(tokens),
        path_tokens=tokens,
        path_patches=(whole, crop),
    )
