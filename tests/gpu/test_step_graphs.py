"""On a GPU, at full width: the Step3 towers in several budgets of both paths, poisoned."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from actors.engine.budgets import Segments, model_capacity
from actors.engine.device import Device
from actors.engine.graphs import GraphSet, capture
from actors.families.step3_vl.tower import StepTower
from actors.options import GraphOptions
from actors.spec.model_spec import ModelSpec
from actors.spec.sizing import PATHS
from actors.spec.views import WindowSizing
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Item, ItemPlan, Size
from tests.gpu.test_tiled_graphs import poison
from tests.gpu.towers import cuda, finished, relative_error, shallow, towers

pytestmark = pytest.mark.gpu

PRESETS = ("step3vl-10b", "step3-321b")


@pytest.mark.parametrize("preset", PRESETS)
def test_budgets_equal_the_reference(preset: str) -> None:
    assert worst_error(shallow(preset), cuda()) < 3e-2


def worst_error(model: ModelSpec, device: Device, most: int = 8) -> float:
    """Relative, over both paths' graphs of one, two and `most` views, in bfloat16 and float32."""
    tower, reference = towers(model, device)
    assert isinstance(tower, StepTower)
    image, crop = tower.views.view_tokens
    options = GraphOptions(
        token_budgets=(most * image,),
        global_token_budgets=(image, 2 * image, most * image),
        local_token_budgets=(crop, 2 * crop, most * crop),
    )
    limits = model_capacity(options, tower.spec)
    worst = 0.0
    for path, graphs in capture(tower, limits, device, EncoderMetrics()).items():
        eager = GraphSet(reference, path, (), Segments(0), device)
        for seed, budget in enumerate(graphs.budgets):
            poison(graphs)
            items = items_within(tower, path, budget, seed)
            rows = finished(graphs.run(budget, items))
            assert bool(rows.isfinite().all()), (path, budget)
            worst = max(worst, relative_error(rows, finished(eager.run(None, items))))
    print(f"{model.id}: worst relative error {worst:.1e}, budgets {limits.budgets}")
    return worst


def items_within(tower: StepTower, path: str, budget: int, seed: int) -> list[Item]:
    """Items of mixed sizes with random pixels that together fit a budget of a path."""
    random, generator = Random(seed), np.random.default_rng(seed)
    sizing, index = tower.spec.sizing, PATHS.index(path)
    assert isinstance(sizing, WindowSizing)
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
