"""MiniCPM-V against transformers' modules and image processor, through graphs and eagerly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import (
    MiniCPMV4_6ImageProcessorPil,
)

from actors.engine.budgets import Segments
from actors.errors import TooLarge
from actors.families.minicpmv.tower import MiniCpmTower, nearest_taps
from actors.media.image import decode
from actors.media.patchify import patchifier_of
from actors.models.layers.patches import places
from actors.models.load import load
from actors.options import ModelOptions
from actors.spec.slices import ScaledSlices
from actors.types import ItemPlan, ProcessorKwargs, Size
from tests.checkpoints_minicpm import SIZES, write_minicpmv
from tests.images import PHOTOGRAPHS, photograph
from tests.parity.graphs import captured, random_patches
from tests.parity.table import check

PACKS = [
    [Size(84, 84)],
    [Size(640, 480)],
    [Size(300, 100), Size(20, 50), Size(1000, 200), Size(168, 168)],
    [Size(20 + 99 * i, 900 - 90 * i) for i in range(9)],
]
sides = st.integers(1, 6000)


@dataclass(frozen=True)
class Pair:
    """The same weights in transformers' model and in our tower."""

    model: Any
    tower: MiniCpmTower
    kind: str


@pytest.fixture(scope="module", params=["4_6", "4_7"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """float32 on the CPU."""
    folder = tmp_path_factory.mktemp(request.param)
    model = write_minicpmv(folder, request.param)
    tower = load(ModelOptions(id=str(folder), dtype="float32"), torch.device("cpu"))
    assert isinstance(tower, MiniCpmTower)
    return Pair(model, tower, f"minicpmv{request.param}")


@pytest.mark.parametrize("spare", [None, 0, 1, 100], ids=["eager", "exact", "spare-1", "spare-100"])
@pytest.mark.parametrize("sizes", PACKS, ids=["one", "sliced", "four", "nine"])
def test_equals_transformers(pair: Pair, sizes: Sequence[Size], spare: int | None) -> None:
    tower = pair.tower
    plans = [tower.sizing.plan(size) for size in sizes]
    patches = random_patches(plans, 588)
    tokens = sum(plan.tokens for plan in plans)
    budget = None if spare is None else tokens + spare
    graphs = captured(tower, "default", (budget,), Segments(12))
    ours = graphs.encode(budget, plans, patches)
    assert ours.shape == (tokens, tower.spec.width)
    check(pair.kind, ours, theirs(pair, plans, patches))


@pytest.mark.parametrize("name", PHOTOGRAPHS)
@pytest.mark.parametrize("most", [None, 1, 9])
def test_patches_of_photographs(pair: Pair, name: str, most: int | None) -> None:
    spec = pair.tower.spec.asked("image", ProcessorKwargs(max_patches=most))
    plan, patches = patchifier_of(spec).patchify(decode(photograph(name)))
    settings = SIZES | ({"max_slice_nums": most} if most else {})
    processor = MiniCPMV4_6ImageProcessorPil(do_normalize=False, **settings)
    found = processor(Image.open(BytesIO(photograph(name))), return_tensors="pt")
    assert found["target_sizes"].tolist() == [list(each) for each in pair.tower.pictures([plan])]
    ours = raster(pair.tower, plan, patches).numpy().astype(np.int64)
    values = found["pixel_values"][0].unflatten(2, (-1, 14)).permute(2, 0, 1, 3)
    published = (values * 255).round().numpy().astype(np.int64)
    assert np.abs(ours - published).mean() < 0.2
    assert np.abs(ours - published).max() <= 16
    assert spec.kinds == ("image",)


@given(sides, sides, st.sampled_from([168, 448]), st.integers(1, 12))
def test_sizes_are_as_minicpmv_gives_them(width: int, height: int, scale: int, most: int) -> None:
    sizing = ScaledSlices(14, 4, picture_pixels=scale, max_slices=most)
    size = Size(width, height)
    if max(width, height) > 200 * min(width, height):
        with pytest.raises(TooLarge, match="crop it"):
            sizing.plan(size)
        return
    expected = published_sizes(size, scale, most)
    plan = sizing.plan(size)
    pictures = sizing.pictures(plan)
    assert [(14 * rows, 14 * columns) for rows, columns in pictures] == expected
    assert plan.patches == sum(rows * columns for rows, columns in pictures)
    assert sizing.least_tokens <= min(rows * columns for rows, columns in pictures) // 16
    assert plan.tokens <= sizing.largest_tokens()
    assert max(max(each) for each in pictures) <= sizing.longest_side_patches()


def test_a_budget_tells_the_most_slices() -> None:
    sizing = ScaledSlices(14, 4, picture_pixels=448, max_slices=9)
    assert sizing.defaults() == {"max_patches": 9}
    assert sizing.largest(sizing.largest_tokens()) == {"max_patches": 9}
    assert sizing.largest(1) == {"max_patches": 1}


@pytest.mark.parametrize("grid", [(4, 4), (32, 32), (4, 444), (36, 28), (80, 12)])
@pytest.mark.parametrize("side", [10, 32, 70])
def test_positions_are_the_nearest(grid: tuple[int, int], side: int) -> None:
    from transformers.vision_utils import get_vision_nearest_position_ids

    taps, weights = nearest_taps(places(*grid, 1), *grid, side)
    expected = get_vision_nearest_position_ids(torch.tensor([grid]), side)
    assert taps[:, 0].tolist() == expected.tolist()
    assert weights.eq(1).all()


def published_sizes(size: Size, scale: int, most: int) -> list[tuple[int, int]]:
    """Height and width of the whole image, and of each slice, by transformers' processor."""
    rule, sides = MiniCPMV4_6ImageProcessorPil(), (size.height, size.width)
    grid = rule.get_sliced_grid(sides, most, scale)
    given = {"scale_resolution": scale, "patch_size": 14, "downsample_mode": "16x"}
    first = rule.find_best_resize(sides, allow_upscale=grid is None, **given)
    if grid is None:
        return [first]
    height, width = rule.get_refine_size(sides, grid, allow_upscale=True, **given)
    return [first] + [(height // grid[0], width // grid[1])] * (grid[0] * grid[1])


def raster(tower: MiniCpmTower, plan: ItemPlan, patches: Tensor) -> Tensor:
    """The patches of each picture row by row: [patches, 3, 14, 14]."""
    parts, start = [], 0
    for rows, columns in tower.pictures([plan]):
        row, column = places(rows, columns, 4).unbind(1)
        order = (row * columns + column).argsort()
        parts.append(patches[start : start + rows * columns][order])
        start += rows * columns
    return torch.cat(parts).view(-1, 3, 14, 14)


@torch.no_grad()
def theirs(pair: Pair, plans: Sequence[ItemPlan], patches: Sequence[Tensor]) -> Tensor:
    """get_image_features of all pictures in one batch, as the processor lays them side by side."""
    spec = pair.tower.spec
    mean, std = (torch.tensor(values)[:, None, None] for values in (spec.mean, spec.std))
    each = zip(plans, patches, strict=True)
    pixels = torch.cat([raster(pair.tower, plan, rows) for plan, rows in each])
    beside = ((pixels / 255 - mean) / std).permute(1, 2, 0, 3).flatten(2)[None]
    sizes = torch.tensor(pair.tower.pictures(plans))
    features = pair.model.model.get_image_features(beside, target_sizes=sizes, return_dict=True)
    return torch.cat(list(features.pooler_output))
