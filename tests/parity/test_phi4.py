"""Phi-4-multimodal against transformers' module and image processor, through graphs and eagerly."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from actors.engine.budgets import Segments
from actors.errors import TooLarge
from actors.families.phi4_multimodal import spec as phi4
from actors.families.phi4_multimodal.tower import PhiTower
from actors.families.registry import read, vision_defaults
from actors.media.patchify import cut_blocks, patchifier_of
from actors.models.load import load
from actors.options import ModelOptions
from actors.spec.slices import PaddedCrops
from actors.types import ItemPlan, Size
from tests.checkpoints_clip import TOWER
from tests.checkpoints_phi import SIDE, write_phi4, write_phi4mm
from tests.images import opened
from tests.parity.graphs import captured
from tests.parity.table import check
from tests.without_torchvision import processed, processor

NAME = "phi4_multimodal", "Phi4MultimodalImageProcessor"
SIZES = [
    *(Size(56, 56), Size(112, 168), Size(90, 70), Size(41, 120), Size(300, 40), Size(13, 60)),
    *(Size(57, 56), Size(200, 199), Size(30, 12)),
]
"""Whole crops and padded ones: by an even or an odd number of patches, or by less than one."""

sides = st.integers(1, 6000)


@dataclass(frozen=True)
class Pair:
    """The same weights in transformers' module and in our tower."""

    embed: Any
    tower: PhiTower
    folder: Path


@pytest.fixture(scope="module", params=["phi4_multimodal", "phi4_multimodal-last", "phi4mm"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """float32 on the CPU."""
    folder = tmp_path_factory.mktemp(request.param)
    kind, _, last = request.param.partition("-")
    embed = write_phi4mm(folder) if kind == "phi4mm" else write_phi4(folder, -1 if last else -2)
    with pytest.MonkeyPatch.context() as patch:
        small = phi4.TOWER | TOWER | {"image_size": SIDE}
        patch.setitem(vision_defaults(), "phi4mm", small)  # its own code knows the sizes
        tower = loaded(folder, "float32")
    assert tower.spec.family == kind
    return Pair(embed, tower, folder)


def loaded(folder: Path, dtype: str) -> PhiTower:
    options = ModelOptions.model_validate({"id": str(folder), "dtype": dtype})
    tower = load(options, torch.device("cpu"))
    assert isinstance(tower, PhiTower)
    return tower


@dataclass(frozen=True)
class Image:
    """Random pixels, as transformers' processor divides them; rounded to bytes."""

    plan: ItemPlan
    patches: Tensor
    outputs: Any


def image_of(tower: PhiTower, size: Size) -> Image:
    generator = torch.Generator().manual_seed(size.width)
    shape = (3, size.height, size.width)
    pixels = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    square = {"height": SIDE, "width": SIDE}
    outputs = processed(*NAME, [pixels], size=square, dynamic_hd=tower.crops.max_crops)
    values = outputs["image_pixel_values"].round().clamp(0, 255)
    outputs["image_pixel_values"] = values
    plan = tower.sizing.plan(size)
    cut = []
    for crop, picture in zip(values[0], tower.pictures_of(plan), strict=True):
        shown = crop[:, : picture.rows * 14, : picture.columns * 14].byte()
        cut.append(cut_blocks(shown, 14, 2))
    return Image(plan, torch.cat(cut), outputs)


@torch.no_grad()
def theirs(pair: Pair, image: Image, dtype: torch.dtype = torch.float32) -> Tensor:
    spec = pair.tower.spec
    mean, std = (torch.tensor(values)[:, None, None] for values in (spec.mean, spec.std))
    pixels = (image.outputs["image_pixel_values"] / 255 - mean) / std
    # It counts the 16 x 16 tokens of the whole image as published, which here has 2 x 2.
    count = image.outputs["num_img_tokens"][0] - 16 * (16 + 1) + 2 * (2 + 1)
    tokens = torch.full((1, count), 5)
    rows: Tensor = pair.embed(
        tokens,
        torch.zeros(*tokens.shape, 96, dtype=dtype),
        pixels.to(dtype),
        image.outputs["image_sizes"],
        image.outputs["image_attention_mask"],
    )
    return rows[0]


@pytest.mark.parametrize("spare", [None, 0, 1, 40], ids=["eager", "exact", "spare-1", "spare-40"])
@pytest.mark.parametrize("sizes", [SIZES, SIZES[:1], SIZES[3:4]], ids=["nine", "whole", "padded"])
def test_equals_transformers(pair: Pair, sizes: Sequence[Size], spare: int | None) -> None:
    images = [image_of(pair.tower, size) for size in sizes]
    exact = [theirs(pair, image) for image in images]
    assert [image.plan.tokens for image in images] == [len(rows) for rows in exact]
    check(pair.tower.spec.family, encoded(pair.tower, images, spare), torch.cat(exact))


def encoded(tower: PhiTower, images: Sequence[Image], spare: int | None) -> Tensor:
    """Through a graph with so many tokens to spare, whose patches hold random bytes; or eagerly."""
    plans = [image.plan for image in images]
    tokens = sum(plan.path_tokens[0] for plan in plans)
    budget = None if spare is None else tokens + spare
    graphs = captured(tower, "default", (budget,), Segments(9))
    rows = graphs.encode(budget, plans, [image.patches for image in images])
    return tower.postprocess([rows], plans)


def test_bfloat16_is_as_near_to_float32_as_transformers_is(pair: Pair) -> None:
    """Queries are scaled for the longer heads, which rounds their weights once more."""
    if pair.tower.spec.family == "phi4mm":
        pytest.skip("the same tower")
    images = [image_of(pair.tower, size) for size in SIZES]
    exact = torch.cat([theirs(pair, image) for image in images])
    ours = encoded(loaded(pair.folder, "bfloat16"), images, None)
    rounding = replace(pair, embed=deepcopy(pair.embed).bfloat16())
    rounded = torch.cat([theirs(rounding, image, torch.bfloat16) for image in images])
    assert (ours.float() - exact).norm() <= 1.1 * (rounded.float() - exact).norm()


@pytest.mark.parametrize("size", [(600, 400), (1920, 1080), (300, 1100), (90, 70), (448, 448)])
def test_patches_are_those_of_the_processor(size: tuple[int, int]) -> None:
    model = read(ModelOptions(id="phi4-multimodal", load_format="dummy"))
    pixels = torch.from_numpy(np.array(opened().resize(size))).permute(2, 0, 1).contiguous()
    outputs = processed(*NAME, [pixels])
    plan, patches = patchifier_of(model).patchify(pixels)
    whole, *crops = outputs["image_pixel_values"][0]
    _, down, across = plan.grid_thw
    columns = outputs["image_sizes"][0, 1] // 448
    canvas = torch.cat(
        [torch.cat(crops[i : i + columns], 2) for i in range(0, len(crops), columns)], 1
    )
    shown = canvas[:, : down * 14, : across * 14].byte()
    cut = [one for row in shown.split(448, 1) for one in row.split(448, 2)]
    assert patches[1024:].equal(torch.cat([cut_blocks(one, 14, 2) for one in cut]))
    rounded = cut_blocks(whole.round().clamp(0, 255).byte(), 14, 2)
    assert (patches[:1024].int() - rounded.int()).abs().max() <= 1
    # What the clamping of overshoots at edges loses.
    assert (whole.clamp(0, 255) - whole).abs().mean() < 0.1


@given(sides, sides, st.sampled_from([1, 6, 36]))
def test_tokens_and_masks_are_those_of_the_processor(width: int, height: int, most: int) -> None:
    sizing, size = PaddedCrops(14, 2, picture_pixels=448, max_crops=most), Size(width, height)
    rule, image = (
        processor(*NAME, pixels=False).dynamic_preprocess,
        torch.empty(()).expand(3, height, width),
    )
    try:
        plan = sizing.plan(size)
    except TooLarge:
        with pytest.raises(ValueError, match="aspect ratio is very extreme"):
            rule(image, 448, 14, 32, max_num=most)
        return
    _, mask = rule(image, 448, 14, 32, max_num=most)
    shown = (int(mask[:, 0].sum()), int(mask[0].sum()))
    assert plan.kept == shown
    down, across = -(-shown[0] // 2), -(-shown[1] // 2)
    assert plan.tokens == 256 + 1 + down * across + down + 16
    assert plan.path_tokens[0] <= sizing.largest_tokens()
    assert max(plan.grid_thw) <= sizing.longest_side_patches()
    pictures = [min(448 // 14, plan.grid_thw[1] - y) for y in range(0, plan.grid_thw[1], 32)]
    assert min(pictures) >= 2
