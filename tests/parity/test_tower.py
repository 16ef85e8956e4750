"""The tower against transformers' get_image_features, packed and padded as the engine does it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.vision_utils import get_vision_window_index

from actors.models.load import load
from actors.models.tower import Tower
from actors.options import ModelOptions
from actors.types import ItemPlan, Size
from tests.checkpoints import CHECKPOINTS, KIMI, KIMI_K25, PADDLE, VIDEO_LLAMA, write_made
from tests.checkpoints_audio import write_qwen3_omni, write_qwen25_omni
from tests.parity.conftest import Pair
from tests.parity.table import check

SIZES = [
    [Size(224, 224)],
    [Size(640, 480), Size(96, 300)],
    [Size(32 * (1 + i % 7), 32 * (1 + i % 5)) for i in range(20)],
    [Size(3000, 15), Size(64, 64), Size(15, 3000)],
]


@pytest.mark.parametrize("sizes", SIZES, ids=["one", "two", "twenty", "aspect-200"])
@pytest.mark.parametrize("spare", [0, 1, 300], ids=["exact", "spare-1", "spare-300"])
def test_equals_transformers(pair: Pair, sizes: Sequence[Size], spare: int) -> None:
    plans, patches, expected = known(pair, tuple(sizes))
    budget = sum(plan.path_tokens[0] for plan in plans) + spare
    ours = encode(pair.tower, plans, patches, budget, segments=24)
    assert ours.shape == (sum(plan.tokens for plan in plans), pair.tower.spec.width)
    check(pair.model_type, ours, expected)


@cache
def known(pair: Pair, sizes: tuple[Size, ...]) -> tuple[list[ItemPlan], Tensor, Tensor]:
    """Plans, random patches and transformers' rows: the same for every budget."""
    plans = [pair.tower.spec.sizing.plan(size) for size in sizes]
    patches = random_packed(pair.tower, plans)
    return plans, patches, theirs(pair, plans, patches)


@pytest.mark.parametrize(
    ("model_type", "written"),
    [("qwen3_vl", write_qwen3_omni), ("qwen2_5_vl", write_qwen25_omni)],
)
def test_vision_towers_beside_audio_towers(
    model_type: str, written: Callable[[Path], Any], tmp_path: Path
) -> None:
    """Qwen3-Omni's is Qwen3-VL's under other names, and Qwen2.5-Omni's Qwen2.5-VL's."""
    reference = written(tmp_path)
    options = ModelOptions(id=str(tmp_path), dtype="float32", tower="vision")
    tower = load(options, torch.device("cpu"))
    assert tower.spec.kinds == ("image",)
    pair = Pair(reference.thinker, tower, tmp_path, model_type)
    plans = [tower.spec.sizing.plan(size) for size in (Size(640, 480), Size(96, 300))]
    patches = random_packed(tower, plans)
    ours = encode(tower, plans, patches, sum(plan.tokens for plan in plans) + 5, segments=4)
    check(model_type, ours, theirs(pair, plans, patches))


@pytest.mark.parametrize(
    "model_type", ["qwen2_vl", "qwen2_5_vl", "exaone4_5", "glm4v", "glm5_next"]
)
def test_rotary_frequencies_are_those_of_the_configuration(model_type: str, tmp_path: Path) -> None:
    rope = {"rope_parameters": {"rope_type": "axial", "rope_theta": 77.0}}
    made = CHECKPOINTS[model_type]
    reference = write_made(tmp_path, replace(made, vision={**made.vision, **rope}))
    tower = load(ModelOptions(id=str(tmp_path), dtype="float32"), torch.device("cpu"))
    pair = Pair(reference, tower, tmp_path, model_type)
    plans = [tower.spec.sizing.plan(size) for size in (Size(640, 480), Size(96, 300))]
    patches = random_packed(tower, plans)
    ours = encode(tower, plans, patches, sum(plan.tokens for plan in plans), segments=4)
    check(model_type, ours, theirs(pair, plans, patches))


def test_temporal_groups_are_segments_of_their_own(pair: Pair) -> None:
    if not pair.model_type.startswith(("qwen", "exaone")):
        pytest.skip("transformers has another entry for this family's videos")
    plan = ItemPlan((3, 4, 6), 72, 18, (18,), frames=6)
    patches = random_packed(pair.tower, [plan])
    ours = encode(pair.tower, [plan], patches, 32, segments=8)
    check(pair.model_type, ours, theirs(pair, [plan], patches))


def test_a_buffer_full_of_an_earlier_pack_changes_nothing(pair: Pair) -> None:
    big, small = (pair.tower.spec.sizing.plan(Size(side, side)) for side in (320, 96))
    buffers = static(pair.tower, big.tokens + 30, 8)
    stage(pair.tower, buffers, [big], random_packed(pair.tower, [big]), 8)
    pair.tower.forward("default", buffers)
    shapes = pair.tower.inputs("default", small.tokens + 3, 8)
    first = {name: buffers[name][: shape[0]] for name, (shape, _) in shapes.items()}
    patches = random_packed(pair.tower, [small])
    for smaller in (buffers, first):
        stage(pair.tower, smaller, [small], patches, 8)
        ours = pair.tower.forward("default", smaller)
        assert ours.isfinite().all()
        rows = pair.tower.postprocess([ours[: small.path_tokens[0]]], [small])
        check(pair.model_type, rows, theirs(pair, [small], patches))


def test_bfloat16_is_as_near_to_float32_as_transformers_is(pair: Pair) -> None:
    plans = [pair.tower.spec.sizing.plan(Size(320, 240))]
    patches = random_packed(pair.tower, plans)
    exact = theirs(pair, plans, patches)
    options = ModelOptions(id=str(pair.folder), dtype="bfloat16")
    rounded = load(options, torch.device("cpu"))
    ours = encode(rounded, plans, patches, plans[0].tokens + 5, segments=2).float()
    reference = replace(pair, reference=deepcopy(pair.reference))
    original = reference.reference.model
    getattr(original, "visual", original).bfloat16()
    if pair.model_type == PADDLE:  # outside
        original.projector.bfloat16()
    theirs_rounded = theirs(reference, plans, patches).float()
    assert (ours - exact).norm() <= 1.1 * (theirs_rounded - exact).norm()


def random_packed(tower: Tower, plans: Sequence[ItemPlan]) -> Tensor:
    """uint8 [patches of all, bytes of a patch]."""
    generator = torch.Generator().manual_seed(len(plans))
    rows = sum(plan.patches for plan in plans)
    (_, row_bytes), _ = tower.inputs("default", 1, 1)["patches"]
    return torch.randint(0, 256, (rows, row_bytes), dtype=torch.uint8, generator=generator)


def static(tower: Tower, budget: int, segments: int) -> dict[str, Tensor]:
    """Inputs of a budget, with random bytes where pixels will lie."""
    shapes = tower.inputs("default", budget, segments)
    buffers = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    buffers["patches"].random_()
    return buffers


def stage(
    tower: Tower,
    buffers: dict[str, Tensor],
    plans: Sequence[ItemPlan],
    patches: Tensor,
    segments: int,
) -> None:
    """Writes a pack into the first rows of the inputs."""
    budget = len(buffers["patches"]) // tower.spec.sizing.merge_size**2
    values = tower.metadata("default", plans, budget, segments) | {"patches": patches}
    assert values.keys() == buffers.keys()
    for name, value in values.items():
        buffers[name][: len(value)] = value


def encode(
    tower: Tower, plans: Sequence[ItemPlan], patches: Tensor, budget: int, segments: int
) -> Tensor:
    """Rows of all items."""
    buffers = static(tower, budget, segments)
    stage(tower, buffers, plans, patches, segments)
    output = tower.forward("default", buffers)
    assert output.shape == (budget, tower.spec.width)
    assert output.isfinite().all()
    return tower.postprocess([output[: sum(plan.path_tokens[0] for plan in plans)]], plans)


def theirs(pair: Pair, plans: Sequence[ItemPlan], patches: Tensor) -> Tensor:
    """get_image_features: main features, then deepstack features, side by side."""
    with torch.no_grad():
        grid = torch.tensor([plan.grid_thw for plan in plans])
        pixels = pixel_values(pair, plans, patches)
        if pair.model_type == KIMI_K25:  # its tower does not do it
            pixels = pixels.to(pair.reference.model.vision_tower.patch_embed.proj.weight.dtype)
        return rows_of(features(pair, pixels, grid))


def features(pair: Pair, pixels: Tensor, grid: Tensor) -> Any:
    """get_image_features."""
    merges = [torch.ones(len(grid), dtype=torch.long)] if pair.model_type == VIDEO_LLAMA else []
    return pair.reference.model.get_image_features(pixels, grid, *merges, return_dict=True)


def pixel_values(pair: Pair, plans: Sequence[ItemPlan], patches: Tensor) -> Tensor:
    """What the family's own processor makes of the patches."""
    spec = pair.tower.spec
    mean, std = (torch.tensor(values)[:, None] for values in (spec.mean, spec.std))
    patches = as_published(pair, plans, patches)
    pixels: Tensor = (patches.unflatten(1, (3, -1)) / 255 - mean) / std
    frames = spec.vision.get("temporal_patch_size", 1)
    if pair.model_type in (KIMI_K25, PADDLE):
        side: int = spec.vision["patch_size"]
        return pixels.view(-1, 3, side, side)
    return pixels[:, :, None].expand(-1, -1, frames, -1).flatten(1)


def as_published(pair: Pair, plans: Sequence[ItemPlan], patches: Tensor) -> Tensor:
    """Patches in the order of the family's own processor."""
    vision = pair.tower.spec.vision
    grids = torch.tensor([plan.grid_thw for plan in plans])
    if "window_size" in vision:
        order, _ = get_vision_window_index(grids, 2, vision["window_size"], vision["patch_size"])
        order = (4 * order[:, None] + torch.arange(4)).flatten()
    elif pair.model_type in (KIMI, KIMI_K25, PADDLE, "hunyuan_vl"):  # raster order
        starts = (grids.prod(1).cumsum(0) - grids.prod(1)).tolist()
        order = torch.cat(
            [
                start + raster_in_blocks(rows, columns)
                for start, (_, rows, columns) in zip(starts, grids.tolist(), strict=True)
            ]
        )
    else:
        return patches
    published = torch.empty_like(patches)
    published[order] = patches
    return published


def raster_in_blocks(rows: int, columns: int) -> Tensor:
    """Where in raster order the patches of a grid lie that follow each other block after block."""
    raster = torch.arange(rows * columns).view(rows // 2, 2, columns // 2, 2)
    return raster.transpose(1, 2).flatten()


def rows_of(features: Any) -> Tensor:
    """What get_image_features gives, as rows: deepstack features beside the main ones."""
    columns = [features.pooler_output, *getattr(features, "deepstack_features", ())]
    return torch.cat([torch.cat(list(items)) for items in columns], dim=1)
