"""On a GPU, at full size: videos beside images in every budget's second graph, against float32."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.budgets import Segments
from actors.capture import capture
from actors.device import Device
from actors.graphs import GraphSet
from actors.metrics import EncoderMetrics
from actors.models.load import load
from actors.models.tower import Tower
from actors.options import GraphOptions, ModelOptions
from actors.two_paths import model_capacity
from actors.types import Item, ItemPlan
from tests.gpu.test_graphs import item, relative_error

pytestmark = pytest.mark.gpu

PRESETS = ("qwen3vl-2b", "qwen25vl-7b", "glm41v-9b")


@pytest.fixture(scope="module", params=PRESETS)
def towers(request: pytest.FixtureRequest) -> Iterator[tuple[Tower, Tower, Device]]:
    """bfloat16, and the same weights in float32 in the reference form."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from actors.cuda import CudaDevice

    device = CudaDevice()
    options = ModelOptions(id=request.param, load_format="dummy", dtype="bfloat16")
    exact = options.model_copy(update={"dtype": "float32"})
    yield load(options, device.device), load(exact, device.device), device
    torch.cuda.empty_cache()


def video(groups: int, rows: int, columns: int, seed: int, row_bytes: int) -> Item:
    """Random patches of both frames of each group of a grid of merge blocks."""
    patches, tokens = 4 * groups * rows * columns, groups * rows * columns
    plan = ItemPlan((groups, 2 * rows, 2 * columns), patches, tokens, (tokens,), frames=groups)
    pixels = np.random.default_rng(seed).integers(0, 256, (2, patches, row_bytes), dtype=np.uint8)
    return Item(plan, pixels[0], pixels[1])


def finished(rows: Tensor) -> Tensor:
    torch.cuda.synchronize()
    return rows.clone()


def test_every_budget_equals_the_reference(towers: tuple[Tower, Tower, Device]) -> None:
    tower, reference, device = towers
    (_, row_bytes), _ = tower.inputs("default", 64, 1)["patches"]
    limits = model_capacity(GraphOptions(token_budgets=(64, 256, 1024)), tower.spec)
    graphs = capture(tower, limits, device, EncoderMetrics())["default"]
    eager = GraphSet(reference, "default", (), Segments(0), device)
    assert graphs.captured() == 6
    for budget in graphs.budgets:
        groups = budget // 64
        pack = [
            item(4, 4, budget, row_bytes),
            video(groups, 5, 6, budget + 1, row_bytes),
            item(3, 5, budget + 2, row_bytes),
        ]
        for items in (pack, pack[:1], pack[1:2], [pack[0], pack[2]]):
            for tensor in (graphs.inputs.tensors["patches"], graphs.inputs.tensors["later"]):
                tensor.random_(0, 256)
            torch.cuda.synchronize()
            rows = finished(graphs.run(budget, items))
            assert bool(rows.isfinite().all()), budget
            assert relative_error(rows, finished(eager.run(None, items))) < 5e-2, budget
