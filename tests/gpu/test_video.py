"""On a GPU, at full width: videos beside images in every budget's second graph, against float32."""

from __future__ import annotations

import numpy as np
import pytest

from actors.engine.budgets import Segments, model_capacity
from actors.engine.device import Device
from actors.engine.graphs import GraphSet, capture
from actors.families.kimi_vl.tower import KimiTower
from actors.options import GraphOptions
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Item, ItemPlan
from tests.gpu.test_graphs import item
from tests.gpu.test_tiled_graphs import poison
from tests.gpu.towers import cuda, finished, relative_error, shallow, towers

pytestmark = pytest.mark.gpu

PRESETS = ("qwen3vl-2b", "qwen25vl-7b", "glm41v-9b", "kimik25")


@pytest.mark.parametrize("preset", PRESETS)
def test_budgets_equal_the_reference(preset: str) -> None:
    assert worst_error(preset, cuda(), (64, 256, 1024)) < 2.5e-2


def worst_error(preset: str, device: Device, budgets: tuple[int, ...]) -> float:
    """Relative, over every budget's two graphs, in bfloat16 against float32."""
    tower, reference = towers(shallow(preset), device)
    (_, row_bytes), _ = tower.inputs("default", 64, 1)["patches"]
    limits = model_capacity(GraphOptions(token_budgets=budgets), tower.spec)
    graphs = capture(tower, limits, device, EncoderMetrics())["default"]
    eager = GraphSet(reference, "default", (), Segments(0), device)
    assert graphs.captured() == 2 * len(budgets)
    worst = 0.0
    assert tower.spec.video
    pictures = tower.spec.video.group if isinstance(tower, KimiTower) else 1
    for budget in graphs.budgets:
        groups = budget // 64
        pack = [
            item(4, 4, budget, row_bytes),
            video(groups, 6 // pictures, 5, budget + 1, row_bytes, pictures),
            item(3, 5, budget + 2, row_bytes),
        ]
        for items in (pack, pack[:1], pack[1:2], [pack[0], pack[2]]):
            poison(graphs)
            rows, exact = (
                finished(
                    one.tower.postprocess(
                        [finished(one.run(which, items))], [i.plan for i in items]
                    )
                )
                for one, which in ((graphs, budget), (eager, None))
            )
            assert bool(rows.isfinite().all()), budget
            worst = max(worst, relative_error(rows, exact))
    print(f"{preset}: worst relative error {worst:.1e}, budgets {graphs.budgets}")
    return worst


def video(
    groups: int, rows: int, columns: int, seed: int, row_bytes: int, pictures: int = 1
) -> Item:
    """Random patches of a grid of merge blocks: of both frames of each group, or of so many
    pictures of each, one less in the last."""
    seen = groups * pictures - (pictures > 1)
    patches, tokens = 4 * seen * rows * columns, groups * rows * columns
    plan = ItemPlan(
        *((groups, 2 * rows, 2 * columns), patches, tokens, (patches // 4,)),
        frames=groups,
        group_pictures=pictures,
    )
    pixels = np.random.default_rng(seed).integers(0, 256, (2, patches, row_bytes), dtype=np.uint8)
    return Item(plan, pixels[0], None if pictures > 1 else pixels[1])
