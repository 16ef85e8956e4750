"""On a GPU, at full width: both paths in pairs of budgets, poisoned, against float32."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.engine.budgets import Capacity, Segments, model_capacity
from actors.engine.device import Device
from actors.engine.engine import Engine
from actors.engine.graphs import GraphSet, capture
from actors.families.deepseek_ocr.tower import OcrTower
from actors.options import GraphOptions
from actors.spec.model_spec import ModelSpec
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Item, Size
from tests.gpu.test_tiled_graphs import poison
from tests.gpu.towers import cuda, finished, relative_error, shallow, towers

pytestmark = pytest.mark.gpu


PRESETS = ("deepseek-ocr", "deepseek-ocr2")
Pair = tuple[OcrTower, OcrTower]


@pytest.fixture(scope="module", params=PRESETS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Pair, Device]]:
    """The towers of `ocr`, for all tests here."""
    device = cuda()
    yield ocr(shallow(request.param), device), device
    torch.cuda.empty_cache()


def test_pairs_of_budgets_equal_the_reference(pair: tuple[Pair, Device]) -> None:
    assert worst_error(*pair, 4) < 3e-2


def test_packs_through_the_engine_keep_their_rows(pair: tuple[Pair, Device]) -> None:
    assert engine_error(*pair, 16, 16) < 3e-2


def ocr(model: ModelSpec, device: Device) -> Pair:
    """In bfloat16, and the same weights in float32."""
    tower, reference = towers(model, device)
    assert isinstance(tower, OcrTower)
    assert isinstance(reference, OcrTower)
    return tower, reference


def limits_of(tower: OcrTower, images: int) -> Capacity:
    """Budgets of one whole image and of so many; of one crop and of twice as many."""
    image, crop = tower.sizing.view_tokens
    options = GraphOptions(
        token_budgets=(max(images * image, 2 * images * crop),),
        global_token_budgets=(image, images * image),
        local_token_budgets=(crop, 2 * images * crop),
    )
    return model_capacity(options, tower.spec)


def worst_error(pair: Pair, device: Device, images: int) -> float:
    """Relative, over all pairs of budgets: what one path puts out survives the other's replay."""
    tower, reference = pair
    limits = limits_of(tower, images)
    graphs = capture(tower, limits, device, EncoderMetrics())
    worst = 0.0
    for whole in limits.budgets[0]:
        for crops in limits.budgets[1]:
            for path in graphs.values():
                poison(path)
            items = items_within(tower, whole, crops)
            budgets = (whole, crops if sum(one.plan.path_tokens[1] for one in items) else 0)
            rows = encode(tower, graphs, budgets, items, device)
            assert bool(rows.isfinite().all()), budgets
            worst = max(worst, relative_error(rows, exact(reference, items, device)))
    print(f"{tower.spec.id}: worst relative error {worst:.1e}, budgets {limits.budgets}")
    return worst


def engine_error(pair: Pair, device: Device, images: int, count: int) -> float:
    """Relative, of items that share packs and come one after the other without waiting."""
    tower, reference = pair
    limits = limits_of(tower, images)
    graphs = capture(tower, limits, device, EncoderMetrics())
    engine = Engine(tower, graphs, limits, device, EncoderMetrics())
    items = [item(tower, size(Random(seed)), seed) for seed in range(count)]
    try:
        answers = [engine.submit(one) for one in items]
        rows = [answer.result(60).rows.to(device.device) for answer in answers]
    finally:
        engine.close()
    return max(
        relative_error(one, exact(reference, [each], device))
        for one, each in zip(rows, items, strict=True)
    )


def encode(
    tower: OcrTower,
    graphs: dict[str, GraphSet],
    budgets: tuple[int | None, ...],
    items: list[Item],
    device: Device,
) -> Tensor:
    """Both paths, then the rows in order."""
    with torch.inference_mode():
        device.fork()  # the second path replays on a stream of its own
        outputs = [
            path.run(budget, items) for path, budget in zip(graphs.values(), budgets, strict=True)
        ]
        device.join()
        with device.running():
            rows = tower.postprocess(outputs, [one.plan for one in items])
        return finished(rows)


def exact(reference: OcrTower, items: list[Item], device: Device) -> Tensor:
    """Eagerly, in float32."""
    eager = {
        path: GraphSet(reference, path, (), Segments(0), device) for path in reference.spec.paths
    }
    return encode(reference, eager, (None, None), items, device)


def items_within(tower: OcrTower, whole: int, crops: int) -> list[Item]:
    """Items of mixed sizes with random pixels that together fit both budgets, at least one."""
    random, found = Random(whole + crops), [item(tower, Size(8, 8), 0)]
    for seed in range(1, 20):
        one = item(tower, size(random), seed)
        totals = [sum(t) for t in zip(*(o.plan.path_tokens for o in [*found, one]), strict=True)]
        if totals[0] <= whole and totals[1] <= crops:
            found.append(one)
    return found


def size(random: Random) -> Size:
    """Of an image with crops, or without."""
    return Size(random.randint(50, 2500), random.randint(50, 2500))


def item(tower: OcrTower, pixels: Size, seed: int) -> Item:
    """Random pixels, with the crops that an image of this size has."""
    plan, width = tower.sizing.plan(pixels), 3 * tower.sizing.crops.patch_size**2
    values = np.random.default_rng(seed).integers(0, 256, (plan.patches, width), dtype=np.uint8)
    return Item(plan, values)
