"""Molmo 2 against transformers' modules and processors, through graphs and eagerly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.video_utils import VideoMetadata

from actors.engine import video_chunks
from actors.engine.budgets import Capacity, Segments
from actors.engine.device import Device
from actors.engine.engine import Engine
from actors.engine.graphs import capture
from actors.families.molmo2.tower import MolmoTower
from actors.families.registry import read
from actors.media.patchify import patchifier_of
from actors.models.load import load
from actors.options import ModelOptions
from actors.spec.sampling import UpToFps
from actors.spec.tiles import OverlappingTiles
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Clip, Item, ProcessorKwargs, Size
from tests.checkpoints_molmo import SIZE, write_molmo2, write_published_molmo2
from tests.images import item_of, opened
from tests.parity.graphs import captured
from tests.parity.table import check
from tests.parity.test_sampling import function
from tests.videos import patchify_video
from tests.without_torchvision import processed, processor

NAME = "molmo2", "Molmo2ImageProcessor"
SIZES = [Size(98, 98), Size(30, 200), Size(200, 60), Size(600, 590), Size(57, 140), Size(10, 9)]
"""One tile and up to four, of canvases of 7, 10, 13 and 16 patches a side."""
sides = st.integers(1, 6000)


@dataclass(frozen=True)
class Pair:
    """The same weights in transformers' model and in our tower."""

    model: Any
    tower: MolmoTower


@pytest.fixture(scope="module", params=[write_molmo2, write_published_molmo2])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """float32 on the CPU."""
    folder = tmp_path_factory.mktemp("molmo2")
    write: Callable[[Path], Any] = request.param
    model = write(folder)
    tower = load(ModelOptions(id=str(folder), dtype="float32"), torch.device("cpu"))
    assert isinstance(tower, MolmoTower)
    return Pair(model, tower)


def pixels_of(size: Size) -> Tensor:
    generator = torch.Generator().manual_seed(size.width)
    return torch.randint(256, (3, size.height, size.width), generator=generator, dtype=torch.uint8)


def normalised(pair: Pair, patches: Tensor) -> Tensor:
    """Of pixels from 0 to 255, colour after colour in each."""
    spec = pair.tower.spec
    mean, std = (torch.tensor(values).repeat(14**2) for values in (spec.mean, spec.std))
    return (patches / 255 - mean) / std


def image_of(pair: Pair, size: Size) -> tuple[Item, Tensor]:
    """Random pixels, and transformers' rows of them by its own processor."""
    pixels = pixels_of(size)
    outputs = processed(*NAME, [pixels], size=SIZE, max_crops=4, overlap_margins=[2, 2])
    with torch.no_grad():
        features = pair.model.model.get_image_features(
            normalised(pair, outputs["pixel_values"]),
            outputs["image_token_pooling"],
            outputs["image_grids"],
            return_dict=True,
        )
    (rows,) = features.pooler_output
    return item_of(patchifier_of(pair.tower.spec), pixels), rows


def video_of(pair: Pair, count: int) -> tuple[Item, Tensor]:
    """The same of frames that the client chose."""
    generator = torch.Generator().manual_seed(count)
    frames = torch.randint(256, (count, 3, 50, 70), generator=generator, dtype=torch.uint8)
    outputs = processed("molmo2", "Molmo2VideoProcessor", [frames], size=SIZE)
    with torch.no_grad():
        features = pair.model.model.get_video_features(
            normalised(pair, outputs["pixel_values_videos"]),
            outputs["video_token_pooling"],
            outputs["video_grids"],
            return_dict=True,
        )
    (rows,) = features.pooler_output
    clip = Clip(Size(70, 50), count, 1.0, chosen=True)
    return patchify_video(pair.tower.spec, clip, frames), rows


@pytest.mark.parametrize("spare", [None, 0, 3], ids=["eager", "exact", "spare"])
@pytest.mark.parametrize("films", [(), (3,), (1, 4)], ids=["images", "video", "videos"])
def test_equals_transformers(pair: Pair, films: Sequence[int], spare: int | None) -> None:
    pack = [image_of(pair, size) for size in SIZES]
    for place, count in enumerate(films):
        pack.insert(2 * place + 1, video_of(pair, count))
    items = [item for item, _ in pack]
    assert [item.plan.tokens for item in items] == [len(rows) for _, rows in pack]
    ours = encoded(pair.tower, items, spare)
    check("molmo2", ours, torch.cat([rows for _, rows in pack]))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_one_image(pair: Pair, size: Size) -> None:
    item, rows = image_of(pair, size)
    check("molmo2", encoded(pair.tower, [item], 0), rows)


def encoded(tower: MolmoTower, items: Sequence[Item], spare: int | None) -> Tensor:
    """Through a graph with so many tiles to spare, whose patches hold random bytes; or eagerly."""
    plans = [item.plan for item in items]
    tile, budget = tower.sizing.tile_tokens, None
    if spare is not None:
        budget = sum(plan.path_tokens[0] for plan in plans) + spare * tile
    graphs = captured(tower, "default", (budget,), Segments(9, frames=9))
    return tower.postprocess([graphs.run(budget, items)], plans)


@pytest.mark.parametrize("tiles", [2, 4, 40])
def test_a_video_in_runs(pair: Pair, tiles: int) -> None:
    tower, most = pair.tower, tiles * pair.tower.sizing.tile_tokens
    room = Capacity(((most,),), (most,), items=4, frames=40, frame_tokens=1)
    device, metrics = Device(), EncoderMetrics()
    engine = Engine(tower, capture(tower, room, device, metrics), room, device, metrics)
    pack = [video_of(pair, 9), image_of(pair, SIZES[0]), video_of(pair, 1)]
    answers = [engine.submit(item) for item, _ in pack]
    for answer, (_, rows) in zip(answers, pack, strict=True):
        encoded = answer.result(60)
        assert encoded.source == "graph"
        check("molmo2", video_chunks.rows_of(encoded), rows)
    engine.close()


@pytest.mark.parametrize("size", [(600, 400), (1920, 1080), (300, 1100), (90, 70), (378, 378)])
def test_patches_are_those_of_the_processor(size: tuple[int, int]) -> None:
    model = read(ModelOptions(id="molmo2-4b", load_format="dummy"))
    pixels = torch.from_numpy(np.array(opened().resize(size))).permute(2, 0, 1).contiguous()
    outputs = processed(*NAME, [pixels])
    plan, patches = patchifier_of(model).patchify(pixels)
    ours = patches.view(-1, 3, 14**2).transpose(1, 2).flatten(1)
    assert ours.equal(outputs["pixel_values"].flatten(0, 1).byte())
    assert plan.tokens == len(outputs["image_token_pooling"])
    grids = outputs["image_grids"][0].tolist()
    assert [-(-count // 2) for count in plan.grid_thw[1:]] == grids[2:]
    clip = Clip(Size(*size), 1, 1.0, chosen=True)
    item = patchify_video(model, clip, [pixels])
    assert torch.from_numpy(item.patches).equal(patches[: 27**2])
    assert item.plan.tokens == 81


@given(sides, sides, st.integers(1, 24))
def test_tokens_are_those_of_the_processor(width: int, height: int, most: int) -> None:
    sizing = OverlappingTiles(*(378, 14, 1, 8), window=2, margins=(4, 4)).asked(
        ProcessorKwargs(max_patches=most)
    )
    rule, plan = processor(*NAME), sizing.plan(Size(width, height))
    assert plan.tokens == rule.get_number_of_image_patches(height, width, {"max_crops": most})
    _, crops = rule.get_image_grid_and_crops(height, width, {"max_crops": most})
    assert plan.patches == crops * 27**2
    assert plan.tokens <= plan.path_tokens[0] <= sizing.token_range()[1]


@pytest.mark.parametrize("kwargs", [{}, {"fps": 0.5}, {"fps": 3}, {"num_frames": 5}], ids=str)
@pytest.mark.parametrize("fps", [1.0, 2.0, 12.5, 29.97])
def test_frames(fps: float, kwargs: dict[str, Any]) -> None:
    ours = UpToFps(64, 2.0).asked(ProcessorKwargs(**kwargs))
    theirs = function("molmo2", "sample_frames")
    own = SimpleNamespace(num_frames=64, max_fps=2)
    for frames in (*range(1, 60), 191, 1000, 2221):
        metadata = VideoMetadata(total_num_frames=frames, fps=fps, duration=frames / fps)
        expected = theirs(own, metadata=metadata, **kwargs)
        found = ours.indices(frames, fps)
        # torch.arange now and then has one more, of a frame beyond the last.
        assert found == [int(index) for index in expected if index < frames], frames


def test_frames_by_default() -> None:
    video = read(ModelOptions(id="molmo2-4b", load_format="dummy")).video
    assert video
    assert video.plan(Clip(Size(640, 360), 900, 25.0)).tokens == 64 * 81
    assert video.plan(Clip(Size(640, 360), 250, 25.0)).tokens == 20 * 81
