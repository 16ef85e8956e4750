"""On a GPU, at full size: every budget, poisoned buffers, padding, aliasing, memory."""

from __future__ import annotations

from itertools import cycle
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.engine.budgets import Segments
from actors.engine.engine import Engine
from actors.engine.graphs import GraphSet
from actors.types import Item, ItemPlan
from tests.gpu.conftest import Captured
from tests.gpu.test_tiled_graphs import poison
from tests.gpu.towers import finished, relative_error

pytestmark = pytest.mark.gpu

LARGEST_REFERENCE_TOKENS = 2048
"""Beyond it the float32 reference takes too long; there the eager form is the reference."""


def item(rows: int, columns: int, seed: int, row_bytes: int = 768) -> Item:
    """Random patches of a grid of merge blocks."""
    patches = 4 * rows * columns
    plan = ItemPlan((1, 2 * rows, 2 * columns), patches, rows * columns, (rows * columns,))
    generator = np.random.default_rng(seed)
    return Item(plan, generator.integers(0, 256, (patches, row_bytes), dtype=np.uint8))


def items_within(tokens: int, most: int, seed: int, row_bytes: int = 768) -> list[Item]:
    """1 to `most` items of mixed sizes that together hold at most so many tokens."""
    random = Random(seed)
    items: list[Item] = []
    left = tokens
    while left and len(items) < most:
        rows = random.randint(1, max(1, int(min(left, 4096) ** 0.5)))
        columns = random.randint(1, max(1, min(left // rows, 2 * rows)))
        items.append(item(rows, columns, seed + len(items), row_bytes))
        left -= rows * columns
    return items


def test_every_budget_equals_the_reference(captured: Captured) -> None:
    graphs = captured.graphs["default"]
    worst = 0.0
    for budget, most in zip(graphs.budgets, cycle((20, 1, 3))):
        poison(graphs)
        items = items_within(budget, most, seed=budget + most)
        rows = finished(graphs.run(budget, items))
        assert bool(rows.isfinite().all()), (budget, most)
        expected = run_eagerly(captured, budget <= LARGEST_REFERENCE_TOKENS, items)
        error = relative_error(rows, expected)
        worst = max(worst, error)
        assert error < 2e-2, (budget, most, error)
    print(f"{captured.tower.spec.id}: worst relative error {worst:.1e}")


def run_eagerly(captured: Captured, in_float32: bool, items: list[Item]) -> Tensor:
    tower = captured.reference if in_float32 else captured.tower
    return finished(GraphSet(tower, "default", (), Segments(0), captured.device).run(None, items))


def test_an_item_alone_in_every_budget_gives_the_same_rows(captured: Captured) -> None:
    graphs = captured.graphs["default"]
    one = item(7, 9, seed=1)  # 63 tokens: fits the smallest
    rows = []
    for budget in graphs.budgets:
        poison(graphs)
        rows.append(finished(graphs.run(budget, [one])))
    for other in rows[1:]:
        # Each budget has its own matrix products, so its own rounding.
        assert relative_error(other, rows[0]) < 2e-2


def test_rows_on_the_host_never_change_again(captured: Captured) -> None:
    engine = Engine(
        captured.tower, captured.graphs, captured.capacity, captured.device, captured.metrics
    )
    items = [item(5 + seed % 9, 10, seed) for seed in range(24)]
    try:
        answers = [engine.submit(each) for each in items]
        rows = [answer.result(60).rows for answer in answers]
        kept = [each.clone() for each in rows]
        for again in [engine.submit(item(16, 16, 500 + seed)) for seed in range(24)]:
            again.result(60)
    finally:
        engine.close()
    for before, after, each in zip(kept, rows, items, strict=True):
        assert torch.equal(before, after)
        expected = run_eagerly(captured, True, [each]).cpu()
        assert relative_error(after, expected) < 2e-2


@pytest.mark.alone
def test_memory_beyond_the_weights(captured: Captured) -> None:
    used = captured.metrics.registry.get_sample_value("encoder_graph_memory_bytes")
    assert used is not None
    print(
        f"{captured.tower.spec.id}: {captured.graphs['default'].captured()} graphs, "
        f"{used / 1e9:.2f} GB of tensors, {captured.used_bytes / 1e9:.2f} GB in all"
    )
    assert max(used, captured.used_bytes) < 2.5e9
