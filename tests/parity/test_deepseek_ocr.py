"""DeepSeek-OCR against transformers' module of the same towers, and Pillow's views of an image.

DeepSeek-OCR 2 against transformers' module and image processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch import Tensor
from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import (
    DeepseekOcr2ImageProcessorPil,
)

from actors.engine.budgets import Segments, two_path_capacity
from actors.engine.device import Device
from actors.engine.engine import Engine
from actors.engine.graphs import capture
from actors.families.deepseek_ocr.tower import OcrTower
from actors.families.registry import read
from actors.media.image import decode
from actors.media.patchify import CropPatchifier, patchifier_of
from actors.models.load import load
from actors.options import GraphOptions, ModelOptions
from actors.spec.sizing import PATHS
from actors.spec.tiles import StretchedTiles
from actors.spec.views import CropSizing
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Item, ItemPlan, ProcessorKwargs, Size
from tests.checkpoints_ocr import write_deepseek_ocr, write_deepseek_ocr2
from tests.images import PHOTOGRAPHS, item_of, jpeg, opened, photograph
from tests.parity.graphs import captured
from tests.parity.table import check
from tests.patches import SPEC, patches_of

PACKS = {
    "small": [(150, 192)],
    "page": [(400, 600)],
    "mixed": [(90, 70), (1000, 200), (192, 193), (640, 480), (30, 180), (500, 499)],
}
LARGER = [(300, 200), (800, 400)]
"""For DeepSeek-OCR 2, whose views have one size only."""

ONE, TWO = "deepseek_vl_v2", "deepseek_ocr2"
CASES = [
    *((ONE, pack, spare) for pack in PACKS.values() for spare in (None, 0, 1, 7)),
    *((TWO, LARGER, spare) for spare in (None, 1)),
]


@dataclass(frozen=True)
class Pair:
    """The same weights in transformers' model and in our tower, float32 on the CPU."""

    model: Any
    tower: OcrTower
    folder: Path
    kind: str = ONE


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp(request.param)
    model = (write_deepseek_ocr if request.param == ONE else write_deepseek_ocr2)(folder)
    return Pair(model, loaded(folder, "float32"), folder, request.param)


def loaded(folder: Path, dtype: str) -> OcrTower:
    options = ModelOptions.model_validate({"id": str(folder), "dtype": dtype})
    tower = load(options, torch.device("cpu"))
    assert isinstance(tower, OcrTower)
    return tower


def item(tower: OcrTower, size: tuple[int, int]) -> Item:
    """Random pixels, so that every patch differs."""
    plan = tower.sizing.plan(Size(*size))
    width = tower.inputs("local", 9, 1)["patches"][0][1]
    random = np.random.default_rng(plan.patches)
    return Item(plan, random.integers(0, 256, (plan.patches, width), dtype=np.uint8))


@pytest.mark.parametrize(("pair", "sizes", "spare"), CASES, indirect=["pair"])
def test_equals_transformers(
    pair: Pair, sizes: Sequence[tuple[int, int]], spare: int | None
) -> None:
    """`spare`: room for views that no item has; None: no room, eagerly."""
    items, exact = known(pair, tuple(sizes))
    ours = encode(pair.tower, items, spare)
    assert ours.shape == exact.shape == (sum(one.plan.tokens for one in items), 80)
    assert exact.abs().mean() > 0.1
    check(pair.kind, ours, exact)


@cache
def known(pair: Pair, sizes: tuple[tuple[int, int], ...]) -> tuple[list[Item], Tensor]:
    """Items, and transformers' rows: the same for every budget."""
    items = [item(pair.tower, size) for size in sizes]
    return items, theirs(pair, items)


@pytest.mark.parametrize(
    ("pair", "size"), [(ONE, (400, 600)), (TWO, (800, 400))], indirect=["pair"]
)
def test_bfloat16_is_as_near_to_float32_as_transformers_is(
    pair: Pair, size: tuple[int, int]
) -> None:
    items = [item(pair.tower, size)]
    exact = theirs(pair, items)
    ours = encode(loaded(pair.folder, "bfloat16"), items, None)
    rounded = theirs(replace(pair, model=deepcopy(pair.model).bfloat16()), items)
    assert (ours.float() - exact).norm() <= 1.1 * (rounded.float() - exact).norm()


@pytest.mark.parametrize(("pair", "budget"), [(ONE, 162), (TWO, 864)], indirect=["pair"])
def test_photographs_through_the_engine(pair: Pair, budget: int) -> None:
    tower, device, metrics = pair.tower, Device(), EncoderMetrics()
    limits = two_path_capacity(GraphOptions(token_budgets=(budget,)), tower.sizing.view_tokens)
    engine = Engine(tower, capture(tower, limits, device, metrics), limits, device, metrics)
    files = [jpeg(800, 700)]
    if pair.kind == ONE:
        files = [*map(photograph, PHOTOGRAPHS), jpeg(180, 100)]
    items = [item_of(patchifier_of(tower.spec), decode(file)) for file in files]
    answers = [engine.submit(one) for one in items]
    for one, answer in zip(items, answers, strict=True):
        encoded = answer.result(60)
        assert encoded.source == "graph"
        check(pair.kind, encoded.rows, theirs(pair, [one]))
    engine.close()


def encode(tower: OcrTower, items: Sequence[Item], spare: int | None) -> Tensor:
    """With room for `spare` more views on each path, whose pixels are random; None: eagerly."""
    plans, outputs = [one.plan for one in items], []
    for index, path in enumerate(PATHS):
        tokens = sum(plan.path_tokens[index] for plan in plans)
        view = tower.sizing.view_tokens[index]
        budget = None if spare is None else tokens + spare * view
        graphs = captured(tower, path, (budget,), Segments(9))
        outputs.append(graphs.run(budget, items))
    return tower.postprocess(outputs, plans)


@torch.no_grad()
def theirs(pair: Pair, items: Sequence[Item]) -> Tensor:
    """Rows of all items."""
    whole = torch.cat([pixels(pair.tower, one, 0) for one in items])
    crops = torch.cat([pixels(pair.tower, one, 1) for one in items])
    crop_tokens = pair.tower.sizing.view_tokens[1]
    counts = [one.plan.path_tokens[1] // crop_tokens for one in items]
    grids = [layout(pair.tower.sizing, one.plan) for one in items] if pair.kind == ONE else None
    dtype = next(pair.model.parameters()).dtype
    features = pair.model.get_image_features(
        *(whole.to(dtype), crops.to(dtype) if sum(counts) else None, counts),
        *([grids] if grids else []),
        return_dict=True,
    )
    return torch.cat(features.pooler_output)


def pixels(tower: OcrTower, one: Item, path: int) -> Tensor:
    """A path's patches of an item as normalised pixels: float32 [views, 3, side, side]."""
    side = tower.sizing.side_patches[path]
    patches = torch.as_tensor(one.patches[one.plan.rows(path)]).view(-1, side, side, 3, 16, 16)
    return patches.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3) / 127.5 - 1


def layout(sizing: CropSizing, plan: ItemPlan) -> list[int]:
    """Columns and rows of crops, as transformers says them."""
    return [side // sizing.crops.side_patches for side in plan.grid_thw[:0:-1]]


OCR = CropSizing(1024, StretchedTiles(640, 16, 4, max_tiles=9, min_tiles=2))


@pytest.mark.parametrize("size", [(600, 400), (1920, 1080), (333, 1100), (640, 640), (641, 90)])
def test_views_are_those_of_pillow(size: tuple[int, int]) -> None:
    """ImageOps.pad for the whole, resize and crop for the rest, as in the model's own code.

    Pillow rounds between its two passes, hence a tolerance.
    """
    image = opened().resize(size)
    rows, columns = OCR.layout(Size(*size)) or (0, 0)
    whole = ImageOps.pad(image, (1024, 1024), color=(127, 127, 127))
    canvas = image.resize((columns * 640, rows * 640)) if rows else None
    seen = [np.asarray(whole)]
    for index in range(rows * columns):
        assert canvas
        x, y = index % columns * 640, index // columns * 640
        seen.append(np.asarray(canvas.crop((x, y, x + 640, y + 640))))
    ours = patches_of(torch.from_numpy(np.array(image)).permute(2, 0, 1), OCR)
    assert len(ours) == OCR.plan(Size(*size)).patches
    exact = np.concatenate([patches(view) for view in seen])
    difference = np.abs(ours.numpy().astype(np.int64) - exact.astype(np.int64))
    assert difference.mean() < 0.05
    assert difference.max() <= 3


@pytest.mark.parametrize("most", [None, 1, 4])
@pytest.mark.parametrize(
    "size", [(600, 400), (1920, 1080), (333, 1101), (768, 768), (769, 90), (5, 3000)]
)
def test_views_of_deepseek_ocr_2(size: tuple[int, int], most: int | None) -> None:
    """transformers' own image processor, whatever `max_patches` a request says."""
    image = opened().resize(size)
    model = read(ModelOptions(id="deepseek-ocr2", load_format="dummy"))
    model = model.asked("image", ProcessorKwargs(max_patches=most))
    said = {"max_patches": most} if most else {}
    processor = DeepseekOcr2ImageProcessorPil(do_normalize=False)
    theirs = processor(image, return_tensors="np", **said)
    views = [*theirs["pixel_values"], *theirs.get("pixel_values_local", ())]
    exact = np.concatenate([patches((view * 255).round().transpose(1, 2, 0)) for view in views])
    plan, ours = patchifier_of(model).patchify(torch.from_numpy(np.array(image)).permute(2, 0, 1))
    assert plan.patches == len(ours) == len(exact)
    assert plan.path_patches[1] == theirs["num_local_patches"][0] * 48**2
    assert plan.tokens == 256 + 144 * theirs["num_local_patches"][0] + 1
    assert plan.tokens <= model.sizing.token_range()[1]
    difference = np.abs(ours.numpy().astype(np.int64) - exact.astype(np.int64))
    assert difference.mean() < 0.2
    assert difference.max() <= 16


def patches(view: Any) -> Any:
    """[side, side, 3] to [patches, 3 x 16 x 16], row by row."""
    side = len(view) // 16
    parts = view.reshape(side, 16, side, 16, 3).transpose(0, 2, 4, 1, 3)
    return parts.reshape(-1, 768)


def test_crops_are_laid_out_as_the_models_own_code_does() -> None:
    for width in range(100, 4000, 171):
        for height in range(100, 4000, 193):
            theirs = (1, 1) if max(width, height) <= 640 else closest(width, height)
            rows, columns = OCR.layout(Size(width, height)) or (1, 1)
            assert (columns, rows) == theirs


def closest(width: int, height: int) -> tuple[int, int]:
    """deepseek-ai/DeepSeek-OCR: dynamic_preprocess, find_closest_aspect_ratio."""
    ratios = {
        (i, j)
        for n in range(2, 10)
        for i in range(1, n + 1)
        for j in range(1, n + 1)
        if 2 <= i * j <= 9
    }
    best, best_difference = (1, 1), float("inf")
    for ratio in sorted(ratios, key=lambda ratio: ratio[0] * ratio[1]):
        difference = abs(width / height - ratio[0] / ratio[1])
        if difference < best_difference:
            best, best_difference = ratio, difference
        elif difference == best_difference and width * height > 0.5 * 640**2 * ratio[0] * ratio[1]:
            best = ratio
    return best


def test_an_image_that_pillow_padded_looks_centred() -> None:
    image = Image.new("RGB", (300, 101), (255, 0, 0))
    view = CropPatchifier(replace(SPEC, sizing=OCR)).whole(
        torch.from_numpy(np.array(image)).permute(2, 0, 1)
    )
    exact = np.asarray(ImageOps.pad(image, (1024, 1024), color=(127, 127, 127)))
    assert np.array_equal(view.permute(1, 2, 0).numpy(), exact)
