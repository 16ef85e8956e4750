"""Gemma 4 against transformers' modules and processor: sizes, patches, rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.gemma4 import image_processing_pil_gemma4 as theirs

from actors.engine.budgets import Segments
from actors.media.patchify import patchifier_of
from actors.models.load import load
from actors.models.packed import PackedTower
from actors.options import ModelOptions
from actors.spec.sizing import FillingSizing
from actors.types import Item, Size
from tests.checkpoints_tiles import write_gemma4
from tests.images import item_of, opened
from tests.parity.graphs import captured
from tests.parity.table import check

PACKS = [[(300, 200)], [(40, 900), (120, 120), (1000, 3)], [(90 + 30 * i, 200) for i in range(6)]]
SETTINGS: dict[str, Any] = {"max_soft_tokens": 70, "patch_size": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gemma4")


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "clipped"])
def model(request: pytest.FixtureRequest, folder: Path) -> Any:
    return write_gemma4(folder, clipped=request.param)


@pytest.fixture(scope="module")
def tower(model: Any, folder: Path) -> PackedTower:
    """float32 on the CPU."""
    tower = load(ModelOptions(id=str(folder), dtype="float32"), torch.device("cpu"))
    assert isinstance(tower, PackedTower)
    return tower


def image_of(tower: PackedTower, size: tuple[int, int]) -> Item:
    pixels = torch.from_numpy(np.array(opened().resize(size))).permute(2, 0, 1)
    return item_of(patchifier_of(tower.spec), pixels)


def published(tower: PackedTower, item: Item) -> tuple[Tensor, Tensor]:
    """Our patches as the family's own processor gives them: [patches, 48], and x, y of each."""
    _, rows, columns = item.plan.grid_thw
    merge, side = tower.sizing.merge_size, tower.sizing.patch_size
    blocks = torch.as_tensor(item.patches).view(
        rows // merge, columns // merge, merge, merge, 3, side, side
    )
    raster = blocks.permute(0, 2, 1, 3, 5, 6, 4).reshape(rows * columns, -1)
    places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1)
    return raster / 255, places


@torch.no_grad()
def exact(model: Any, tower: PackedTower, items: Sequence[Item]) -> Tensor:
    most = tower.sizing.largest_tokens() * tower.sizing.merge_size**2
    pixels, places = torch.zeros(len(items), most, 48), torch.full((len(items), most, 2), -1)
    for index, item in enumerate(items):
        pixels[index, : item.plan.patches], places[index, : item.plan.patches] = published(
            tower, item
        )
    features = model.model.get_image_features(pixels, places, return_dict=True)
    return torch.cat(list(features.pooler_output))


@pytest.mark.parametrize("spare", [None, 0, 50], ids=["eager", "exact", "spare"])
@pytest.mark.parametrize("sizes", PACKS, ids=["one", "three", "six"])
def test_equals_transformers(
    model: Any, tower: PackedTower, sizes: Sequence[tuple[int, int]], spare: int | None
) -> None:
    items = [image_of(tower, size) for size in sizes]
    tokens = sum(item.plan.tokens for item in items)
    budget = None if spare is None else tokens + spare
    graphs = captured(tower, "default", (budget,), Segments(8))
    rows = tower.postprocess([graphs.run(budget, items)], [item.plan for item in items])
    assert rows.shape == (tokens, tower.spec.width)
    check("gemma4", rows, exact(model, tower, items))


@pytest.mark.parametrize("size", [(300, 200), (40, 900), (1000, 3), (64, 64)], ids=str)
def test_patches_are_those_of_the_processor(tower: PackedTower, size: tuple[int, int]) -> None:
    image, item = opened().resize(size), image_of(tower, size)
    found = theirs.Gemma4ImageProcessorPil(**SETTINGS)(image, return_tensors="pt")
    pixels, places = published(tower, item)
    assert found["num_soft_tokens_per_image"].tolist() == [item.plan.tokens]
    assert found["image_position_ids"][0, : item.plan.patches].equal(places)
    difference = (255 * (found["pixel_values"][0, : item.plan.patches] - pixels)).abs()
    assert difference.mean() < 0.2
    assert difference.max() <= 16  # single pixels that Pillow rounds otherwise


@given(st.integers(1, 20_000), st.integers(1, 20_000))
def test_sizes_are_those_of_the_processor(width: int, height: int) -> None:
    sizing = FillingSizing(16, 3, 280)
    rows, columns = theirs.get_aspect_ratio_preserving_size(height, width, 16, 280 * 9, 3)
    assert sizing.resized(Size(width, height)) == Size(columns, rows)
    plan = sizing.plan(Size(width, height))
    assert plan.tokens <= sizing.largest_tokens()
    assert max(plan.grid_thw) <= sizing.longest_side_patches()
