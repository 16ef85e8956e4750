"""Llama 3.2 Vision against transformers' modules and image processor, in graphs and eagerly."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor
from transformers.models.mllama import image_processing_pil_mllama as theirs

from actors.engine.budgets import Segments, capacity
from actors.engine.device import Device
from actors.engine.engine import Engine
from actors.engine.graphs import capture
from actors.engine.video_chunks import rows_of
from actors.errors import ConfigError
from actors.families.mllama.tower import MllamaTower, sizing_of
from actors.media.image import decode
from actors.media.patchify import cut_tiles, patchifier_of
from actors.models.load import load
from actors.options import GraphOptions, ModelOptions
from actors.spec.tiles import FilledTiles
from actors.telemetry.metrics import EncoderMetrics
from actors.types import ItemPlan, Size
from tests.checkpoints_tiles import MLLAMA_PROCESSOR, write_mllama
from tests.images import PHOTOGRAPHS, item_of, photograph
from tests.parity.graphs import captured, random_patches
from tests.parity.table import check

PACKS = [
    [Size(50, 50)],
    [Size(50, 50), Size(120, 60), Size(300, 30)],
    [Size(20 + 45 * i, 400 - 45 * i) for i in range(9)],
]
sides = st.integers(1, 5000)


@dataclass(frozen=True)
class Pair:
    """The same weights in transformers' model and in our tower."""

    model: Any
    tower: MllamaTower
    folder: Path


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """float32 on the CPU."""
    folder = tmp_path_factory.mktemp("mllama")
    return Pair(write_mllama(folder), loaded(folder, "float32"), folder)


def loaded(folder: Path, dtype: str) -> MllamaTower:
    options = ModelOptions.model_validate({"id": str(folder), "dtype": dtype})
    tower = load(options, torch.device("cpu"))
    assert isinstance(tower, MllamaTower)
    return tower


@pytest.mark.parametrize("spare", [None, 0, 1, 3], ids=["eager", "exact", "spare-1", "spare-3"])
@pytest.mark.parametrize("sizes", PACKS, ids=["one", "three", "nine"])
def test_equals_transformers(pair: Pair, sizes: Sequence[Size], spare: int | None) -> None:
    plans = [pair.tower.sizing.plan(size) for size in sizes]
    patches = random_patches(plans, 588)
    ours = encode(pair.tower, plans, patches, spare)
    assert ours.shape == (sum(plan.tokens for plan in plans), pair.tower.spec.width)
    check("mllama", ours, states(pair, pair.model, plans, patches))


def test_bfloat16_is_as_near_to_float32_as_transformers_is(pair: Pair) -> None:
    plans = [pair.tower.sizing.plan(Size(120, 60))]
    patches = random_patches(plans, 588)
    exact = states(pair, pair.model, plans, patches)
    ours = encode(loaded(pair.folder, "bfloat16"), plans, patches, None)
    rounded = states(pair, deepcopy(pair.model).bfloat16(), plans, patches)
    assert (ours.float() - exact).norm() <= 1.1 * (rounded.float() - exact).norm()


def test_photographs_through_the_engine(pair: Pair) -> None:
    tower, device, metrics = pair.tower, Device(), EncoderMetrics()
    room = capacity(GraphOptions(), tower.sizing.token_range(), 0)
    engine = Engine(tower, capture(tower, room, device, metrics), room, device, metrics)
    items = [item_of(patchifier_of(tower.spec), decode(photograph(name))) for name in PHOTOGRAPHS]
    answers = [engine.submit(item) for item in items]
    for item, answer in zip(items, answers, strict=True):
        encoded = answer.result(60)
        assert encoded.source == "graph"
        exact = states(pair, pair.model, [item.plan], [torch.as_tensor(item.patches)])
        check("mllama", rows_of(encoded), exact)
    engine.close()


@pytest.mark.parametrize("name", PHOTOGRAPHS)
def test_tiles_of_photographs(pair: Pair, name: str) -> None:
    spec = pair.tower.spec
    plan, patches = patchifier_of(spec).patchify(decode(photograph(name)))
    processor = theirs.MllamaImageProcessorPil(**MLLAMA_PROCESSOR | {"do_normalize": False})
    found = processor(Image.open(BytesIO(photograph(name))), return_tensors="pt")
    (ids,), (shown,) = found["aspect_ratio_ids"][0], found["num_tiles"][0]
    assert (int(ids), shown) == (aspect(pair.tower, plan) + 1, plan.tokens // 17)
    tiles = (found["pixel_values"][0, 0] * 255).round().to(torch.uint8)
    expected = torch.cat([cut_tiles(tile, pair.tower.sizing) for tile in tiles])
    difference = (patches.int() - expected.int()).abs()
    assert difference.float().mean() < 0.2
    assert difference.max() <= 16


@given(sides, sides, st.integers(1, 6))
def test_canvases_are_as_mllama_gives_them(width: int, height: int, most: int) -> None:
    sizing, size = FilledTiles(560, 14, 1, most), Size(width, height)
    canvas = theirs.get_optimal_tiled_canvas(height, width, most, 560)
    rows, columns = sizing.layout(size)
    assert (560 * rows, 560 * columns) == canvas
    resized = theirs.get_image_size_fit_to_canvas(height, width, *canvas, 560)
    assert sizing.resized(size) == Size(*reversed(resized))
    assert sizing.aspects == theirs.get_all_supported_aspect_ratios(most)
    plan = sizing.plan(size)
    assert (plan.tokens, plan.patches) == (rows * columns * 1601, most * 1600)
    assert plan.path_tokens == (sizing.token_range()[0],)


def test_a_budget_that_is_not_whole_images(pair: Pair) -> None:
    with pytest.raises(ConfigError, match="token_budgets: 102 is not a multiple of 68, the tokens"):
        pair.tower.inputs("default", 102, 1)


def encode(
    tower: MllamaTower, plans: Sequence[ItemPlan], patches: Sequence[Tensor], spare: int | None
) -> Tensor:
    """Through a graph with room for `spare` images more, random at first; None: eagerly."""
    budget = None if spare is None else (len(plans) + spare) * tower.image_tokens
    graphs = captured(tower, "default", (budget,), Segments(12))
    return tower.postprocess([graphs.encode(budget, plans, patches)], plans)


def aspect(tower: MllamaTower, plan: ItemPlan) -> int:
    side, (_, rows, columns) = tower.sizing.side_patches, plan.grid_thw
    return sizing_of(tower.spec).aspects.index((rows // side, columns // side))


@torch.no_grad()
def states(pair: Pair, model: Any, plans: Sequence[ItemPlan], patches: Sequence[Tensor]) -> Tensor:
    """Cross-attention states of the tiles that show an image."""
    spec, side = pair.tower.spec, pair.tower.sizing.side_patches
    mean, std = (torch.tensor(values)[:, None, None] for values in (spec.mean, spec.std))
    parts = torch.stack(list(patches)).view(len(plans), -1, side, side, 3, 14, 14)
    tiles = parts.permute(0, 1, 4, 2, 5, 3, 6).flatten(5).flatten(3, 4)
    pixels = (tiles / 255 - mean) / std
    shown = [plan.tokens // pair.tower.sizing.tile_tokens for plan in plans]
    mask = torch.zeros(len(plans), 1, pixels.shape[1], dtype=torch.long)
    for image, count in enumerate(shown):
        mask[image, 0, :count] = 1
        pixels[image, count:] = 0  # what empty tiles hold does not count
    ids = torch.tensor([[aspect(pair.tower, plan) + 1] for plan in plans])
    seen = model.model.vision_model(pixels[:, None].to(model.dtype), ids, mask).last_hidden_state
    rows = model.model.multi_modal_projector(seen)[:, 0]
    return torch.cat(
        [image[:count].flatten(0, 1) for image, count in zip(rows, shown, strict=True)]
    )
