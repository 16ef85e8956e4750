"""Pixtral, Mistral 3 and LightOnOCR against transformers' modules, through graphs and eagerly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from actors.engine.budgets import Segments
from actors.families.pixtral.tower import PixtralTower
from actors.media.image import decode
from actors.media.patchify import patchifier_of
from actors.models.load import load
from actors.options import ModelOptions
from actors.types import ItemPlan, Size
from tests.checkpoints_pixtral import write_lighton_ocr, write_mistral3, write_pixtral
from tests.images import PHOTOGRAPHS, photograph
from tests.parity.graphs import captured, random_patches
from tests.parity.table import check

PACKS = [
    [Size(84, 84)],
    [Size(300, 100), Size(20, 50), Size(280, 280)],
    [Size(20 + 33 * i, 300 - 30 * i) for i in range(9)],
]
WRITERS: dict[str, Callable[[Path], Any]] = {
    "pixtral": write_pixtral,
    "mistral3": write_mistral3,
    "lighton_ocr": write_lighton_ocr,
}


@dataclass(frozen=True)
class Pair:
    """The same weights in transformers' model and in our tower."""

    model: Any
    tower: PixtralTower


@pytest.fixture(scope="module", params=WRITERS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """float32 on the CPU."""
    folder = tmp_path_factory.mktemp(request.param)
    model = WRITERS[request.param](folder)
    tower = load(ModelOptions(id=str(folder), dtype="float32"), torch.device("cpu"))
    assert isinstance(tower, PixtralTower)
    return Pair(model, tower)


@pytest.mark.parametrize("spare", [None, 0, 1, 100], ids=["eager", "exact", "spare-1", "spare-100"])
@pytest.mark.parametrize("sizes", PACKS, ids=["one", "three", "nine"])
def test_equals_transformers(pair: Pair, sizes: Sequence[Size], spare: int | None) -> None:
    tower = pair.tower
    plans = [tower.sizing.plan(size) for size in sizes]
    patches = random_patches(plans, 588)
    tokens = sum(plan.tokens for plan in plans)
    budget = None if spare is None else tokens + spare
    graphs = captured(tower, "default", (budget,), Segments(12))
    ours = graphs.encode(budget, plans, patches)
    assert ours.shape == (tokens, tower.spec.width)
    check(tower.spec.family, ours, theirs(pair, plans, patches))


@pytest.mark.parametrize("name", PHOTOGRAPHS)
def test_patches_of_photographs(pair: Pair, name: str) -> None:
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    spec, merge = pair.tower.spec, pair.tower.sizing.merge_size
    plan, patches = patchifier_of(pair.tower.spec).patchify(decode(photograph(name)))
    processor = PixtralImageProcessorPil(
        size={"longest_edge": 280}, patch_size=14 * merge, do_normalize=False
    )
    found = processor(Image.open(BytesIO(photograph(name))), return_tensors="pt")
    assert found["image_sizes"].tolist() == [[14 * plan.grid_thw[1], 14 * plan.grid_thw[2]]]
    ours = picture(plan, patches, merge).numpy().astype(np.int64)
    published = (found["pixel_values"][0] * 255).round().numpy().astype(np.int64)
    assert np.abs(ours - published).mean() < 0.2
    assert np.abs(ours - published).max() <= 16
    assert spec.kinds == ("image",)


def picture(plan: ItemPlan, patches: Tensor, merge: int) -> Tensor:
    """uint8 [3, height, width] of which these are the patches, in merge-block order."""
    _, rows, columns = plan.grid_thw
    blocks = patches.view(rows // merge, columns // merge, merge, merge, 3, 14, 14)
    return blocks.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, 14 * rows, 14 * columns)


@torch.no_grad()
def theirs(pair: Pair, plans: Sequence[ItemPlan], patches: Sequence[Tensor]) -> Tensor:
    """get_image_features of pictures in one batch, as the processor pads them."""
    spec = pair.tower.spec
    mean, std = (torch.tensor(values)[:, None, None] for values in (spec.mean, spec.std))
    pictures = [
        (picture(plan, each, pair.tower.sizing.merge_size) / 255 - mean) / std
        for plan, each in zip(plans, patches, strict=True)
    ]
    sizes = [each.shape[1:] for each in pictures]
    height, width = (max(side) for side in zip(*sizes, strict=True))
    batch = torch.stack(
        [F.pad(each, (0, width - each.shape[2], 0, height - each.shape[1])) for each in pictures]
    )
    features = pair.model.model.get_image_features(
        batch, image_sizes=torch.tensor(sizes), return_dict=True
    )
    return torch.cat(list(features.pooler_output))
