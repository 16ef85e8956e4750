"""Towers over SigLIP 2 with NaFlex against transformers' modules and processors, through graphs and
eagerly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor
from transformers.models.siglip2 import image_processing_pil_siglip2 as siglip2

from actors.engine.budgets import Segments
from actors.errors import TooLarge
from actors.families.registry import read
from actors.media.image import decode
from actors.media.patchify import patchifier_of
from actors.models.layers.patches import antialiased_weights, places
from actors.models.load import load
from actors.models.packed import PackedTower
from actors.options import ModelOptions
from actors.spec.model_spec import ModelSpec
from actors.spec.sizing import NaflexSizing
from actors.spec.slices import SquareSlices
from actors.types import ItemPlan, ProcessorKwargs, Size
from tests import llama4
from tests.checkpoints_clip import BUDGET, write_lfm2, write_siglip2
from tests.images import PHOTOGRAPHS, opened, photograph
from tests.parity.graphs import captured, random_patches
from tests.parity.table import check
from tests.patches import patches_of

PACKS = [
    [Size(84, 84)],
    [Size(640, 480), Size(20, 50), Size(3000, 15), Size(168, 100)],
    [Size(20 + 99 * i, 900 - 90 * i) for i in range(9)],
]
sides = st.integers(1, 6000)

Grid = tuple[int, int]


@dataclass(frozen=True)
class Pair:
    """The same weights in transformers' model and in our tower."""

    model: Any
    tower: PackedTower
    folder: Path


CHECKPOINTS: dict[str, Callable[[Path], Any]] = {
    "siglip2": write_siglip2,
    "lfm2_vl": write_lfm2,
    "lfm2_vl-plain": partial(write_lfm2, plain=True),
}


@pytest.fixture(scope="module", params=CHECKPOINTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """float32 on the CPU."""
    folder = tmp_path_factory.mktemp("naflex")
    model = CHECKPOINTS[request.param](folder)
    return Pair(model, loaded(folder, "float32"), folder)


def loaded(folder: Path, dtype: str) -> PackedTower:
    options = ModelOptions.model_validate({"id": str(folder), "dtype": dtype})
    tower = load(options, torch.device("cpu"))
    assert isinstance(tower, PackedTower)
    return tower


@pytest.mark.parametrize("spare", [None, 0, 1, 100], ids=["eager", "exact", "spare-1", "spare-100"])
@pytest.mark.parametrize("sizes", PACKS, ids=["one", "four", "nine"])
def test_equals_transformers(pair: Pair, sizes: Sequence[Size], spare: int | None) -> None:
    tower = pair.tower
    plans = [tower.sizing.plan(size) for size in sizes]
    patches = random_patches(plans, 3 * tower.sizing.patch_size**2)
    tokens = sum(plan.tokens for plan in plans)
    budget = None if spare is None else tokens + spare
    graphs = captured(tower, "default", (budget,), Segments(12))
    ours = graphs.encode(budget, plans, patches)
    assert ours.shape == (tokens, tower.spec.width)
    check(tower.spec.family, ours, theirs(pair, plans, patches))


def test_bfloat16_is_as_near_to_float32_as_transformers_is(pair: Pair) -> None:
    plans = [pair.tower.sizing.plan(Size(300, 200))]
    patches = random_patches(plans, 3 * pair.tower.sizing.patch_size**2)
    exact = theirs(pair, plans, patches)
    tower = loaded(pair.folder, "bfloat16")
    graphs = captured(tower, "default", (), Segments(4))
    ours = graphs.encode(None, plans, patches).float()
    rounded = replace(pair, model=deepcopy(pair.model).bfloat16())
    their_error = (theirs(rounded, plans, patches).float() - exact).norm()
    assert (ours - exact).norm() <= 1.1 * their_error


@pytest.mark.parametrize("name", PHOTOGRAPHS)
@pytest.mark.parametrize("most", [None, 9, 400])
def test_patches_of_siglip2(tmp_path: Path, name: str, most: int | None) -> None:
    write_siglip2(tmp_path)
    model = read(ModelOptions(id=str(tmp_path)))
    spec = model.asked("image", ProcessorKwargs(max_patches=most))
    plan, patches = patchifier_of(spec).patchify(decode(photograph(name)))
    settings: dict[str, Any] = BUDGET | ({"max_num_patches": most} if most else {})
    processor = siglip2.Siglip2ImageProcessorPil(do_normalize=False, **settings)
    found = processor(Image.open(BytesIO(photograph(name))), return_tensors="pt")
    assert found["spatial_shapes"].tolist() == [list(plan.grid_thw[1:])]
    published = (found["pixel_values"][0][: plan.patches] * 255).round().numpy().astype(np.int64)
    ours = channels_last(patches).numpy().astype(np.int64)
    assert np.abs(ours - published).mean() < 0.2
    assert np.abs(ours - published).max() <= 16


@given(sides, sides, st.sampled_from([14, 16]), st.sampled_from([1, 64, 256, 1024]))
def test_sizes_are_as_siglip2_gives_them(width: int, height: int, patch: int, most: int) -> None:
    sizing = NaflexSizing(patch, 1, most)
    rows, columns = siglip2.get_image_size_for_max_num_patches(height, width, patch, most)
    assert sizing.resized(Size(width, height)) == Size(columns, rows)
    plan = sizing.plan(Size(width, height))
    assert plan.tokens <= sizing.largest_tokens()
    assert max(plan.grid_thw) <= sizing.longest_side_patches()


LFM2 = SquareSlices(16, 2, 10, 2, 512, 64, 256, 2.0, thumbnail=True)


@pytest.mark.parametrize(
    "size", [(600, 400), (1920, 1080), (300, 1100), (90, 70), (721, 720), (2000, 12)], ids=str
)
@pytest.mark.parametrize("change", [{}, {"thumbnail": False}, {"max_slices": 1}], ids=str)
def test_patches_of_lfm2_vl(size: tuple[int, int], change: dict[str, Any]) -> None:
    sizing = replace(LFM2, **change)
    image = torch.from_numpy(np.array(opened().resize(size))).permute(2, 0, 1)
    found = lfm2_processor(sizing)(image)
    ours = patches_of(image, sizing, "bilinear")
    pictures = sizing.pictures(sizing.plan(Size(*size)))
    assert found["spatial_shapes"].tolist() == [list(one) for one in pictures]
    for one, published in zip(raster(pictures, ours, 2), found["pixel_values"], strict=True):
        assert channels_last(one).equal((published[: len(one)] * 255).round().byte())


def lfm2_processor(sizing: SquareSlices) -> Any:
    """transformers' own."""
    return llama4.processor("lfm2_vl", "Lfm2VlImageProcessor")(
        do_image_splitting=sizing.max_slices > 1,
        min_tiles=sizing.min_slices,
        max_tiles=sizing.max_slices,
        use_thumbnail=sizing.thumbnail,
        return_row_col_info=True,
    )


@given(sides, sides, st.integers(1, 3), st.integers(1, 12), st.booleans())
def test_tokens_of_lfm2_vl(width: int, height: int, least: int, most: int, whole: bool) -> None:
    """As its processor counts placeholders, from the layout of its image processor."""
    sizing = replace(LFM2, min_slices=least, max_slices=most, thumbnail=whole)
    if max(width, height) > 200 * min(width, height):
        with pytest.raises(TooLarge, match="crop it"):
            sizing.plan(Size(width, height))
        return
    plan = sizing.plan(Size(width, height))
    if most >= least:  # else its own raises
        assert plan.tokens == lfm2_tokens(Size(width, height), sizing)
    pictures = sizing.pictures(plan)
    assert plan.patches == sum(rows * columns for rows, columns in pictures)
    assert sizing.least_tokens <= min(rows * columns for rows, columns in pictures) // 4
    assert plan.tokens <= sizing.largest_tokens()
    assert max(max(each) for each in pictures) <= sizing.longest_side_patches()


def lfm2_tokens(size: Size, sizing: SquareSlices) -> int:
    processor, image = lfm2_processor(sizing), {"height": size.height, "width": size.width}
    scale = {"encoder_patch_size": 16, "downsample_factor": 2}
    new_width, new_height = processor.smart_resize(
        **image, **scale, min_image_tokens=64, max_image_tokens=256
    )
    rows = columns = 1
    large = processor._is_image_too_large(
        **image, **scale, max_image_tokens=256, max_pixels_tolerance=2.0
    )
    if large and sizing.max_slices > 1:
        layout = processor._get_grid_layout(
            **image, min_tiles=sizing.min_slices, max_tiles=sizing.max_slices, tile_size=512
        )
        columns, rows = layout[:2]
    whole = SimpleNamespace(image_token="#", image_processor=processor)
    for name in ("_compute_tokens_per_tile", "_compute_tokens_for_image"):
        setattr(whole, name, partial(getattr(Lfm2VlProcessor, name), whole))
    counts = Lfm2VlProcessor._get_image_num_tokens(whole, [new_height, new_width])
    text = Lfm2VlProcessor._build_image_tokens(
        whole, rows, columns, *counts, sizing.thumbnail, use_image_special_tokens=False
    )
    return len(text)


@pytest.mark.parametrize("side", [6, 16])
@pytest.mark.parametrize("size", [1, 2, 5, 6, 15, 16, 17, 40, 200])
def test_positions_are_resized_as_torch_does(size: int, side: int) -> None:
    table = torch.eye(side)[None, None]
    exact = F.interpolate(table, (size, side), mode="bilinear", antialias=True)[0, 0]
    assert torch.allclose(antialiased_weights(size, side), exact, atol=1e-6)


def channels_last(patches: Tensor) -> Tensor:
    """As the processor gives patches: all channels of a pixel together."""
    pixels: Tensor = patches.unflatten(1, (3, -1))
    return pixels.transpose(1, 2).flatten(1)


def raster(pictures: Sequence[Grid], patches: Tensor, merge: int) -> list[Tensor]:
    """The patches of each picture row by row."""
    found = []
    for part, (rows, columns) in zip(
        patches.split([rows * columns for rows, columns in pictures]), pictures, strict=True
    ):
        row, column = places(rows, columns, merge).unbind(1)
        found.append(part[(row * columns + column).argsort()])
    return found


def naflex_inputs(
    spec: ModelSpec, grids: Sequence[Grid], patches: Sequence[Tensor]
) -> dict[str, Tensor]:
    """What the processor gives for pictures of these grids, their patches row by row."""
    most = max(map(len, patches))
    mean, std = (torch.tensor(values)[:, None] for values in (spec.mean, spec.std))
    rows = [
        channels_last(((one.unflatten(1, (3, -1)) / 255 - mean) / std).flatten(1))
        for one in patches
    ]
    return {
        "pixel_values": torch.stack([F.pad(one, (0, 0, 0, most - len(one))) for one in rows]),
        "pixel_attention_mask": torch.stack([torch.arange(most) < len(one) for one in rows]).int(),
        "spatial_shapes": torch.tensor(list(grids)),
    }


@torch.no_grad()
def theirs(pair: Pair, plans: Sequence[ItemPlan], patches: Sequence[Tensor]) -> Tensor:
    """The rows of all images in one padded batch: of SigLIP 2 the last hidden state."""
    spec, grids, parts = pair.tower.spec, [], []
    for plan, part in zip(plans, patches, strict=True):
        pictures = [plan.grid_thw[1:]]
        if isinstance(spec.sizing, SquareSlices):
            pictures = spec.sizing.pictures(plan)
        grids += pictures
        parts += raster(pictures, part, spec.sizing.merge_size)
    given = naflex_inputs(spec, grids, parts)
    if spec.family == "lfm2_vl":
        features = pair.model.model.get_image_features(**given, return_dict=True)
        return torch.cat(list(features.pooler_output))
    rows = pair.model.vision_model(**given, return_dict=True).last_hidden_state
    return torch.cat([one[: len(part)] for one, part in zip(rows, parts, strict=True)])
