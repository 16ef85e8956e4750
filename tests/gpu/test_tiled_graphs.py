"""On a GPU, at full width: the tile families in several budgets, poisoned, against float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from actors.engine.budgets import Segments, capacity, model_capacity
from actors.engine.device import Device
from actors.engine.graphs import GraphSet, capture
from actors.families import registry
from actors.media.patchify import patchifier_of
from actors.models.packed import PackedTower
from actors.models.tiled import TileTower
from actors.options import GraphOptions
from actors.spec.model_spec import ModelSpec
from actors.spec.sizing import MOST_ITEMS_A_BUDGET
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Clip, Item, Size
from tests.gpu.towers import FEWER, cuda, finished, relative_error, shallow, synchronize, towers
from tests.unit.spec.test_tile_spec import changed

pytestmark = pytest.mark.gpu

PRESETS = (
    *("internvl3-8b", "internvl3-78b", "llama4-scout", "llama32-vision-11b", "gemma3-4b"),
    *("siglip-so400m", "clip-vit-l-336", "llava15-7b", "llava-onevision-7b", "paligemma2-3b"),
    *("llava-next-7b", "janus-pro-1b", "aya-vision-8b", "command-a-vision", "smolvlm2-2b"),
    *("dinov2-base", "llava-next-video-7b", "granite-vision-4.1-4b", "molmo2-4b"),
    *("dinov3-vitb16", "ovis2-2b", "mlcd-bigg-448", "aimv2-large-224"),
)
MOST_TOKENS = 4096
"""Of the largest budget: as many as it takes for the long form of every kernel."""
SMALLEST = Size(8, 8)
"""An image of as few tokens as a family makes of one."""


@pytest.mark.parametrize("preset", PRESETS)
def test_budgets_equal_the_reference(preset: str) -> None:
    assert worst_error(shallow(preset), cuda()) < 2e-2


@pytest.mark.parametrize("preset", ["llava-next-video-7b", "molmo2-4b", "nemotron-3-nano-omni"])
def test_frames_of_a_video_beside_images(preset: str) -> None:
    """In the second graph of a budget, and the same images without a video in the first."""
    assert frames_error(shallow(preset), cuda()) < 2e-2


def frames_error(model: ModelSpec, device: Device) -> float:
    """Relative, of the rows of a pack, in bfloat16 against float32."""
    tower, reference = towers(model, device)
    assert isinstance(tower, TileTower | PackedTower)
    assert model.video
    generator, sizing, forms = np.random.default_rng(0), tower.sizing, patchifier_of(model)
    image = sizing.plan(SMALLEST)
    film = model.video.plan(Clip(Size(640, 360), 5, 1.0, chosen=True))
    items = [
        Item(plan, *generator.integers(0, 256, forms.shape(plan), np.uint8))
        for plan in (image, film, image)
    ]
    budget = sum(item.plan.path_tokens[0] for item in items) + 2 * sizing.token_range()[0]
    limits = model_capacity(GraphOptions(token_budgets=(budget,)), model)
    graphs = capture(tower, limits, device, EncoderMetrics())["default"]
    assert graphs.captured() == 2
    eager, worst = GraphSet(reference, "default", (), Segments(0), device), 0.0
    for pack in (items, items[:1], items[1:2]):
        poison(graphs)
        plans = [item.plan for item in pack]
        rows, exact = (
            finished(one.tower.postprocess([finished(one.run(which, pack))], plans))
            for one, which in ((graphs, budget), (eager, None))
        )
        assert bool(rows.isfinite().all())
        worst = max(worst, relative_error(rows, exact))
    print(f"{model.id}: worst relative error {worst:.1e}, budget {budget}")
    return worst


@pytest.mark.parametrize(
    ("preset", "width"),
    [("siglip-so400m", 1152), ("clip-vit-l-336", 1152), ("siglip2-base-naflex", 768)],
)
def test_vectors_of_images_and_texts(preset: str, width: int, tmp_path: Path) -> None:
    text = {"num_hidden_layers": 4, "projection_size": width}
    options = changed(tmp_path, preset, "config.json", {"text_config": text})
    chosen = {"load_format": "dummy", "output": "vector"}
    model = registry.read(options.model_copy(update=chosen))
    assert vectors_error(replace(model, vision={**model.vision, **FEWER[preset]}), cuda()) < 2e-2


def vectors_error(model: ModelSpec, device: Device) -> float:
    """Relative, over every budget of both paths, in bfloat16 against float32."""
    tower, reference = towers(model, device)
    captured = capture(tower, model_capacity(GraphOptions(), model), device, EncoderMetrics())
    generator, worst, text = np.random.default_rng(0), 0.0, model.text_plan
    assert text
    for plan, (path, graphs), values in zip(
        (model.sizing.plan(SMALLEST), text),
        captured.items(),
        (3 * model.sizing.patch_size**2, 4),
        strict=True,
    ):
        eager = GraphSet(reference, path, (), Segments(0), device)
        for budget in graphs.budgets:
            poison(graphs)
            count = max(1, budget // sum(plan.path_tokens) - 1)
            shape = (plan.patches, values)
            patches = generator.integers(0, 256, (count, *shape), np.uint8)
            if plan == text:
                patches[..., 1:] = 0  # ids below 256
            items = [Item(plan, one) for one in patches]
            rows = finished(graphs.run(budget, items))
            assert rows.shape[1] == model.width
            assert bool(rows.isfinite().all()), (path, budget)
            exact = finished(eager.run(None, items))
            worst = max(worst, relative_error(rows[:count], exact))
    print(f"{model.id}: worst relative error of vectors {worst:.1e}")
    return worst


def worst_error(model: ModelSpec, device: Device, most: int = MOST_TOKENS, packs: int = 2) -> float:
    """Relative, over three budgets and as many packs of each, in bfloat16 against float32."""
    tower, reference = towers(model, device)
    assert isinstance(tower, TileTower | PackedTower)
    sizing = tower.sizing
    smallest, largest = sizing.token_range()
    first = max(smallest, *sizing.plan(SMALLEST).path_tokens)
    wanted = (first, 4 * first, max(smallest, most // smallest * smallest))
    budgets = sorted({min(budget, MOST_ITEMS_A_BUDGET * largest) for budget in wanted})
    limits = capacity(GraphOptions(token_budgets=tuple(budgets)), (smallest, largest), 0)
    (graphs,) = capture(tower, limits, device, EncoderMetrics()).values()
    eager = GraphSet(reference, "default", (), Segments(0), device)
    worst = 0.0
    for budget in graphs.budgets:
        for seed in range(packs):
            poison(graphs)
            items = items_within(tower, budget, seed)
            rows = finished(graphs.run(budget, items))
            assert bool(rows.isfinite().all()), (budget, seed)
            worst = max(worst, relative_error(rows, finished(eager.run(None, items))))
    print(f"{model.id}: worst relative error {worst:.1e}, budgets {graphs.budgets}")
    return worst


def poison(graphs: GraphSet) -> None:
    """Random bytes in the pixels of every row: whatever padding there is, it is not zero."""
    for name in {"patches", "later"} & graphs.inputs.tensors.keys():
        graphs.inputs.tensors[name].random_(0, 256)
    synchronize(graphs.device.device)


def items_within(tower: TileTower | PackedTower, budget: int, seed: int) -> list[Item]:
    """Items of mixed sizes with random pixels that together fit a budget, at least one."""
    random, generator = Random(seed), np.random.default_rng(seed)
    width = 3 * tower.sizing.patch_size**2
    plans = [tower.sizing.plan(SMALLEST)]
    for _ in range(20):
        plan = tower.sizing.plan(Size(random.randint(50, 3000), random.randint(50, 3000)))
        if sum(other.path_tokens[0] for other in [*plans, plan]) <= budget:
            plans.append(plan)
    return [
        Item(plan, generator.integers(0, 256, (plan.patches, width), dtype=np.uint8))
        for plan in plans
    ]
