"""The Step3 towers: against transformers' module, or where it has none the published mathematics.

Through graphs of both paths and eagerly; views cut as the families' own processors cut them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from actors.engine.budgets import Segments, model_capacity
from actors.engine.device import Device
from actors.engine.engine import Engine
from actors.engine.graphs import capture
from actors.families.step3_vl.tower import StepTower
from actors.media.image import decode
from actors.media.patchify import cut_blocks, patchifier_of
from actors.models.load import load
from actors.options import GraphOptions, ModelOptions
from actors.spec.sizing import PATHS
from actors.spec.views import PaddedWindows, WindowSizing
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Item, Size
from tests import step3
from tests.checkpoints_step import write_step3, write_step3p7, write_step3vl10b
from tests.images import PHOTOGRAPHS, item_of, opened, photograph
from tests.parity.graphs import captured
from tests.parity.table import check
from tests.patches import patches_of
from tests.step3p7 import Processor

PACKS = [
    [Size(112, 112)],
    [Size(300, 290), Size(80, 50), Size(100, 30)],
    [Size(40 + 30 * i, 300 - 30 * i) for i in range(9)],
]
Features = Callable[[Tensor], Tensor]
"""Normalised views [views, 3, side, side] to [views, tokens, width]."""


@dataclass(frozen=True)
class Pair:
    """The same weights in the reference and in our tower."""

    features: Features
    tower: StepTower


def perception(write: Callable[[Path], object], folder: Path) -> Features:
    model = write(folder).model  # type: ignore[attr-defined]

    def features(pixels: Tensor) -> Tensor:
        rows: Tensor = model.multi_modal_projector(model.vision_model(pixels).last_hidden_state)
        return rows

    return features


def own(folder: Path) -> Features:
    weights = write_step3(folder)
    return lambda pixels: step3.features(weights, pixels, heads=4, depth=3)


CHECKPOINTS: dict[str, Callable[[Path], Features]] = {
    "step3p7": lambda folder: perception(write_step3p7, folder),
    "step_robotics": lambda folder: perception(write_step3vl10b, folder),
    "step3_vl": own,
}


@pytest.fixture(scope="module", params=CHECKPOINTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """float32 on the CPU."""
    folder = tmp_path_factory.mktemp("step")
    features = CHECKPOINTS[request.param](folder)
    tower = load(ModelOptions(id=str(folder), dtype="float32"), torch.device("cpu"))
    assert isinstance(tower, StepTower)
    return Pair(features, tower)


@pytest.mark.parametrize("spare", [None, 0, 1, 5], ids=["eager", "exact", "spare-1", "spare-5"])
@pytest.mark.parametrize("sizes", PACKS, ids=["one", "three", "nine"])
def test_equals_the_reference(pair: Pair, sizes: Sequence[Size], spare: int | None) -> None:
    items = [random_item(pair.tower, size, seed) for seed, size in enumerate(sizes)]
    plans = [item.plan for item in items]
    outputs = []
    for index, path in enumerate(PATHS):
        tokens = sum(plan.path_tokens[index] for plan in plans)
        view = pair.tower.views.view_tokens[index]
        budget = None if spare is None else tokens + spare * view
        graphs = captured(pair.tower, path, (budget,), Segments(4))
        outputs.append(graphs.run(budget, items))
    ours = pair.tower.postprocess(outputs, plans)
    assert ours.shape == (sum(plan.tokens for plan in plans), pair.tower.spec.width)
    exact = torch.cat([theirs(pair, item) for item in items])
    check(pair.tower.spec.family, ours, exact)


def test_photographs_through_the_engine(pair: Pair) -> None:
    tower, device, metrics = pair.tower, Device(), EncoderMetrics()
    limits = model_capacity(GraphOptions(token_budgets=(128,)), tower.spec)
    engine = Engine(tower, capture(tower, limits, device, metrics), limits, device, metrics)
    items = [item_of(patchifier_of(tower.spec), decode(photograph(name))) for name in PHOTOGRAPHS]
    answers = [engine.submit(item) for item in items]
    for item, answer in zip(items, answers, strict=True):
        encoded = answer.result(60)
        assert encoded.source == "graph"
        check(tower.spec.family, encoded.rows, theirs(pair, item))
    engine.close()


SIZES = [(150, 100), (480, 270), (250, 100), (75, 280), (175, 50), (500, 20), (182, 182)]
SIZES += [(900, 125), (1000, 775), (165, 75)]
LIMITS = (182, 126, 756)
"""A quarter of the published 728, 504 and 3024."""


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_views_are_those_of_transformers(size: tuple[int, int]) -> None:
    image = pixels_of(opened().resize(size))
    whole, crops = Processor(*LIMITS).views(image)
    exact = torch.cat([cut_blocks(view, 14, 1) for view in (whole, *crops)])
    assert torch.equal(patches_of(image, WindowSizing(*LIMITS, 14, 1), "bilinear"), exact)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_views_are_those_of_the_first_models_own_code(size: tuple[int, int]) -> None:
    image = opened().resize(size)
    whole, crops = step3.views(image, *LIMITS)
    exact = torch.cat([cut_blocks(pixels_of(view), 14, 1) for view in (whole, *crops)])
    ours = patches_of(pixels_of(image), PaddedWindows(*LIMITS, 14, 1), "bilinear")
    assert ours.shape == exact.shape
    difference = (ours.int() - exact.int()).abs()
    assert difference.float().mean() < 0.2  # Pillow rounds between its two passes
    assert difference.max() <= 3


def random_item(tower: StepTower, size: Size, seed: int) -> Item:
    plan = tower.views.plan(size)
    shape = (plan.patches, 3 * tower.views.patch_size**2)
    return Item(plan, np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


@torch.no_grad()
def theirs(pair: Pair, item: Item) -> Tensor:
    """Rows of all crops of an item, then of the whole view."""
    tower, rows = pair.tower, []
    patch = tower.views.patch_size
    mean, std = (torch.tensor(v)[:, None, None] for v in (tower.spec.mean, tower.spec.std))
    for index in (1, 0):
        side = tower.views.side_patches[index]
        patches = torch.as_tensor(item.patches[item.plan.rows(index)])
        grid = patches.view(-1, side, side, 3, patch, patch)
        views = grid.permute(0, 3, 1, 4, 2, 5).reshape(-1, 3, side * patch, side * patch)
        if len(views):
            rows.append(pair.features((views / 255 - mean) / std).flatten(0, 1))
    return torch.cat(rows)


def pixels_of(image: Image.Image | np.typing.NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)
