"""Nemotron-H Omni against transformers' model and processors, through graphs and eagerly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from actors.engine import video_chunks
from actors.engine.budgets import Capacity, Segments
from actors.engine.device import Device
from actors.engine.engine import Engine
from actors.engine.graphs import capture
from actors.errors import TooLarge
from actors.families.nemotron_h_omni.tower import RadioTower
from actors.families.registry import read
from actors.media.patchify import cut_blocks, patchifier_of
from actors.models.layers.patches import places
from actors.models.load import load
from actors.options import ModelOptions
from actors.spec.sampling import Evenly
from actors.spec.sizing import MAX_ASPECT, PatchRange
from actors.spec.video import TargetPatches
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Clip, Item, Size
from tests.checkpoints_nemotron import PATCHES, TARGET, write_nemotron
from tests.images import opened
from tests.parity.graphs import captured
from tests.parity.table import check
from tests.videos import patchify_video
from tests.without_torchvision import processed, processor

FAMILY, NAME = "nemotron_h_omni", "NemotronH_Omni_Reasoning_V3"
SIZES = [Size(128, 96), Size(30, 200), Size(200, 16), Size(600, 590), Size(57, 140), Size(10, 9)]
"""Of patches: 48 to 160; one is wider than the table of positions, which has 8 x 8."""
sides = st.integers(1, 6000)


@dataclass(frozen=True)
class Pair:
    """The same weights in transformers' model and in our tower."""

    model: Any
    tower: RadioTower


@pytest.fixture(scope="module", params=[False, True], ids=["", "last-norm"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """float32 on the CPU."""
    folder = tmp_path_factory.mktemp(FAMILY)
    model = write_nemotron(folder, predicts=request.param)
    tower = load(ModelOptions(id=str(folder), dtype="float32"), torch.device("cpu"))
    assert isinstance(tower, RadioTower)
    return Pair(model, tower)


def pixels_of(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(shape[-1])
    return torch.randint(256, shape, generator=generator, dtype=torch.uint8)


def normalised(pair: Pair, pixels: Tensor) -> Tensor:
    """Of pixels from 0 to 255, [..., channels, height, width]."""
    spec = pair.tower.spec
    mean, std = (torch.tensor(values)[:, None, None] for values in (spec.mean, spec.std))
    return (pixels / 255 - mean) / std


def rounded(pixels: Tensor) -> Tensor:
    """transformers' processors keep what bicubic resizing overshoots, and do not round."""
    return pixels.round().clamp(0, 255)


def image_of(pair: Pair, size: Size) -> tuple[Item, Tensor]:
    """Random pixels by transformers' processor, rounded, and its model's rows of them."""
    pixels = pixels_of(3, size.height, size.width)
    outputs = processed(FAMILY, f"{NAME}ImageProcessor", [pixels], **PATCHES)
    patches, grid = rounded(outputs["pixel_values"]), outputs["image_grid_hw"]
    values = normalised(pair, patches.view(-1, 3, 16, 16)).flatten(1)
    with torch.no_grad():
        (rows,) = pair.model.get_image_features(values, grid).pooler_output
    plan = pair.tower.sizing.plan(size)
    assert [list(plan.grid_thw[1:])] == grid.tolist()
    row, column = places(*plan.grid_thw[1:], 2).unbind(1)
    return Item(plan, patches[row * plan.grid_thw[2] + column].byte()), rows


def frames_of(frames: Tensor, target: int = TARGET) -> Tensor:
    """Of a video, [frames, channels, height, width], by transformers' processor: pairs of them."""
    rule = processor(FAMILY, f"{NAME}VideoProcessor")
    rule.norm_mean, rule.norm_std, rule.video_target_num_patches = [0.0] * 3, [1 / 255] * 3, target
    pairs: Tensor = rule._preprocess([frames])["pixel_values_videos"].unflatten(2, (2, 3))
    return pairs[0]


def video_of(pair: Pair, count: int, width: int = 70) -> tuple[Item, Tensor]:
    """The same of frames that the client chose."""
    size = Size(width, 50)
    shown = rounded(frames_of(pixels_of(count, 3, size.height, size.width)))
    with torch.no_grad():
        values = normalised(pair, shown).flatten(1, 2)[None]
        (rows,) = pair.model.get_video_features(values).pooler_output
    assert pair.tower.spec.video
    plan = pair.tower.spec.video.plan(Clip(size, count, 1.0, chosen=True))
    first, later = (
        torch.cat([cut_blocks(frame.byte(), 16, 2) for frame in each]).numpy()
        for each in shown.unbind(1)
    )
    return Item(plan, first, later), rows


@pytest.mark.parametrize("spare", [None, 0, 9], ids=["eager", "exact", "spare"])
@pytest.mark.parametrize("films", [(), (3,), (1, 4)], ids=["images", "video", "videos"])
def test_equals_transformers(pair: Pair, films: Sequence[int], spare: int | None) -> None:
    pack = [image_of(pair, size) for size in SIZES]
    for place, count in enumerate(films):
        pack.insert(2 * place + 1, video_of(pair, count, 50 + 40 * place))
    items = [item for item, _ in pack]
    assert [item.plan.tokens for item in items] == [len(rows) for _, rows in pack]
    check(FAMILY, encoded(pair.tower, items, spare), torch.cat([rows for _, rows in pack]))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_one_image(pair: Pair, size: Size) -> None:
    item, rows = image_of(pair, size)
    check(FAMILY, encoded(pair.tower, [item], 0), rows)


def encoded(tower: RadioTower, items: Sequence[Item], spare: int | None) -> Tensor:
    """Through a graph with so many tokens to spare, whose patches hold random bytes; or eagerly."""
    plans = [item.plan for item in items]
    budget = None if spare is None else sum(plan.tokens for plan in plans) + spare
    graphs = captured(tower, "default", (budget,), Segments(9, frames=9, frame_tokens=1))
    return tower.postprocess([graphs.run(budget, items)], plans)


def test_a_video_in_runs(pair: Pair) -> None:
    room = Capacity(((48,),), (48,), items=3, frames=48, frame_tokens=1)
    device, metrics = Device(), EncoderMetrics()
    engine = Engine(pair.tower, capture(pair.tower, room, device, metrics), room, device, metrics)
    pack = [video_of(pair, 13), image_of(pair, SIZES[0]), video_of(pair, 1)]
    answers = [engine.submit(item) for item, _ in pack]
    for answer, (_, rows) in zip(answers, pack, strict=True):
        encoded = answer.result(60)
        assert encoded.source == "graph"
        check(FAMILY, video_chunks.rows_of(encoded), rows)
    engine.close()


@pytest.mark.parametrize("size", [(600, 400), (1920, 1080), (300, 1100), (90, 70), (512, 512)])
def test_patches_are_those_of_the_processor(size: tuple[int, int]) -> None:
    model = read(ModelOptions(id="nemotron-3-nano-omni", load_format="dummy"))
    pixels = torch.from_numpy(np.array(opened().resize(size))).permute(2, 0, 1).contiguous()
    outputs = processed(FAMILY, f"{NAME}ImageProcessor", [pixels])
    plan, patches = patchifier_of(model).patchify(pixels)
    row, column = places(*plan.grid_thw[1:], 2).unbind(1)
    theirs = outputs["pixel_values"][row * plan.grid_thw[2] + column]
    near(patches, theirs)
    item = patchify_video(model, Clip(Size(*size), 1, 1.0, chosen=True), [pixels])
    (group,) = frames_of(pixels[None], target=1024)
    for ours, frame in zip((item.patches, item.later), group, strict=True):
        near(torch.from_numpy(ours), cut_blocks(frame, 16, 2))


def near(ours: Tensor, theirs: Tensor) -> None:
    """Rounded, apart from what bicubic resizing overshoots at edges, which is little."""
    shown = theirs.clamp(0, 255)
    assert (ours - shown).abs().max() < 0.5001
    assert (shown - theirs).abs().mean() < 0.1


@given(sides, sides, st.sampled_from([(1024, 13312), (1024, 1025), (48, 160), (16, 3000)]))
def test_tokens_are_those_of_the_processor(width: int, height: int, ends: tuple[int, int]) -> None:
    assume(max(width, height) <= MAX_ASPECT * min(width, height))
    sizing = PatchRange(16, 2, *ends)
    function = processor(FAMILY, f"{NAME}ImageProcessor")._preprocess.__globals__
    try:
        expected = function["get_patch_grid_size"](height, width, 16, 2, *ends)
    except ZeroDivisionError:
        expected = None
    try:
        plan = sizing.plan(Size(width, height))
    except TooLarge:
        assert expected is None or expected[0] * expected[1] > ends[1]
        return
    if expected:
        assert plan.grid_thw[1:] == expected
    assert ends[0] / 2 <= plan.patches <= ends[1]
    assert plan.tokens <= sizing.largest_tokens()
    assert max(plan.grid_thw) <= sizing.longest_side_patches()


@given(sides, sides, st.sampled_from([1024, 40, 256]))
def test_frames_are_those_of_the_processor(width: int, height: int, target: int) -> None:
    assume(max(width, height) <= MAX_ASPECT * min(width, height))
    video = TargetPatches(Evenly(256, 2.0, by_fps=True), 16, 2, 2, patches=target)
    rule = processor(FAMILY, f"{NAME}VideoProcessor")
    rule.video_target_num_patches = target
    columns, rows = rule._compute_target_patches(height, width)
    plan = video.plan(Clip(Size(width, height), 100, 25.0))
    assert plan.grid_thw == (4, rows, columns)
    assert target / 16 <= rows * columns
    assert max(rows, columns) <= video.longest_side_patches()


def test_frames_by_default() -> None:
    video = read(ModelOptions(id="nemotron-3-nano-omni", load_format="dummy")).video
    assert video
    assert video.plan(Clip(Size(640, 360), 900, 25.0)).grid_thw == (36, 24, 42)
    assert video.plan(Clip(Size(640, 360), 90000, 25.0)).frames == 128
