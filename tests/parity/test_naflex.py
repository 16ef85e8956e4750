"""Towers over SigLIP 2 with NaFlex against transformers' modules and processors, through graphs and
eagerly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor
from transformers.models.siglip2 import image_processing_pil_siglip2 as siglip2

from actors.engine.budgets import Segments
from actors.engine.device import Device
from actors.engine.graphs import GraphSet
from actors.media.image import decode
from actors.media.patchify import patchifier_of
from actors.models.layers.patches import antialiased_weights
from actors.models.load import load
from actors.models.packed import PackedTower
from actors.options import ModelOptions
from actors.spec.model_spec import ModelSpec
from actors.spec.sizing import NaflexSizing
from actors.types import ItemPlan, ProcessorKwargs, Size
from tests.checkpoints_clip import BUDGET, write_siglip2
from tests.images import PHOTOGRAPHS, photograph
from tests.parity.table import check

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
    kind: str


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """float32 on the CPU."""
    folder = tmp_path_factory.mktemp("naflex")
    model = write_siglip2(folder)
    tower = load(ModelOptions(id=str(folder), dtype="float32"), torch.device("cpu"))
    assert isinstance(tower, PackedTower)
    return Pair(model, tower, "siglip2")


@pytest.mark.parametrize("spare", [None, 0, 1, 100], ids=["eager", "exact", "spare-1", "spare-100"])
@pytest.mark.parametrize("sizes", PACKS, ids=["one", "four", "nine"])
def test_equals_transformers(pair: Pair, sizes: Sequence[Size], spare: int | None) -> None:
    tower = pair.tower
    plans = [tower.sizing.plan(size) for size in sizes]
    patches = [random_patches(tower.spec, plan) for plan in plans]
    tokens = sum(plan.tokens for plan in plans)
    budget = None if spare is None else tokens + spare
    graphs = GraphSet(tower, "default", [budget] if budget else [], Segments(12), Device())
    graphs.capture(lambda budget, seconds: None)
    if budget:
        graphs.inputs.tensors["patches"].random_(0, 256)
        assert graphs.replays[budget, False]().isfinite().all()
    ours = graphs.encode(budget, plans, patches)
    assert ours.shape == (tokens, tower.spec.width)
    check(pair.kind, ours, theirs(pair, plans, patches))


@pytest.mark.parametrize("name", PHOTOGRAPHS)
@pytest.mark.parametrize("most", [None, 9, 400])
def test_patches_of_photographs(pair: Pair, name: str, most: int | None) -> None:
    spec = pair.tower.spec.asked("image", ProcessorKwargs(max_patches=most))
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


@pytest.mark.parametrize("side", [6, 16])
@pytest.mark.parametrize("size", [1, 2, 5, 6, 15, 16, 17, 40, 200])
def test_positions_are_resized_as_torch_does(size: int, side: int) -> None:
    table = torch.eye(side)[None, None]
    exact = F.interpolate(table, (size, side), mode="bilinear", antialias=True)[0, 0]
    assert torch.allclose(antialiased_weights(size, side), exact, atol=1e-6)


def random_patches(spec: ModelSpec, plan: ItemPlan) -> Tensor:
    """uint8 [patches, bytes of a patch]."""
    generator = torch.Generator().manual_seed(plan.patches)
    shape = plan.patches, 3 * spec.sizing.patch_size**2
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def channels_last(patches: Tensor) -> Tensor:
    """As the processor gives patches: all channels of a pixel together."""
    pixels: Tensor = patches.unflatten(1, (3, -1))
    return pixels.transpose(1, 2).flatten(1)


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
    """The last hidden state of all images in one padded batch."""
    grids = [plan.grid_thw[1:] for plan in plans]
    given = naflex_inputs(pair.tower.spec, grids, patches)
    rows = pair.model.vision_model(**given, return_dict=True).last_hidden_state
    return torch.cat([one[: plan.patches] for one, plan in zip(rows, plans, strict=True)])
