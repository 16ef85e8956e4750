"""Videos against transformers' get_video_features: beside images, through graphs and eagerly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from actors.engine import video_chunks
from actors.engine.budgets import Capacity, Segments
from actors.engine.device import Device
from actors.engine.engine import Engine
from actors.engine.graphs import ExactGraphSet, GraphSet, capture
from actors.families.kimi_vl.tower import KimiTower
from actors.models.packed import PackedTower, segments_of
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Clip, Item, Size
from tests.checkpoints import KIMI_K25
from tests.parity.conftest import Pair
from tests.parity.table import check
from tests.parity.test_tower import pixel_values, rows_of, theirs
from tests.videos import patchify_video

CLIPS = [
    Clip(Size(84, 56), frames=4, fps=2),
    Clip(Size(130, 200), frames=5, fps=1, chosen=True),
    Clip(Size(300, 120), frames=40, fps=25),
]


@pytest.fixture(scope="module")
def videos(pair: Pair) -> list[tuple[Item, Tensor]]:
    """Of each clip random frames, cut by the tower; transformers' rows of them."""
    if not pair.tower.spec.video:
        pytest.skip("this family takes no videos")
    return [made(pair, clip) for clip in CLIPS]


def made(pair: Pair, clip: Clip) -> tuple[Item, Tensor]:
    if pair.model_type == KIMI_K25:
        return in_groups(pair, clip)
    item, pixels = cut(pair, clip)
    with torch.no_grad():
        features = pair.reference.model.get_video_features(
            pixels, torch.tensor([item.plan.grid_thw]), return_dict=True
        )
    return item, rows_of(features)


def in_groups(pair: Pair, clip: Clip) -> tuple[Item, Tensor]:
    """The same of Kimi-K2.5."""
    tower, video = pair.tower, pair.tower.spec.video
    assert isinstance(tower, KimiTower)
    assert video
    generator = torch.Generator().manual_seed(clip.frames)
    shape = (len(video.indices(clip)), 3, clip.size.height, clip.size.width)
    frames = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    item = patchify_video(tower.spec, clip, frames)
    picture = len(item.patches) // len(frames)
    groups = [length // picture for length in segments_of(item.plan)]
    assert groups == [len(group) for group in video.groups(clip)]
    return item, group_rows(pair, item)


def group_rows(pair: Pair, item: Item) -> Tensor:
    """transformers', of a video of Kimi-K2.5, whose own processor makes a video of each group.

    transformers' get_video_features (5.23) splits the rows as if frames were not pooled, and fails,
    as its tower does on groups of different lengths: these are both, group by group.
    """
    one = replace(item.plan, grid_thw=(1, *item.plan.grid_thw[1:]))
    picture = prod(one.grid_thw)
    pictures = [one] * (item.plan.patches // picture)
    pixels = pixel_values(pair, pictures, torch.from_numpy(item.patches))
    model, rows = pair.reference.model, []
    for group in pixels.split(segments_of(item.plan)):
        grid = torch.tensor([(len(group) // picture, *one.grid_thw[1:])])
        with torch.no_grad():
            seen = model.vision_tower(group, grid, return_dict=True).pooler_output
            rows.append(model.mm_projector(seen).squeeze(1))
    return torch.cat(rows)


def computed(items: Sequence[tuple[Item, Tensor]]) -> list[int]:
    """Tokens of each, before what is pooled."""
    return [item.plan.path_tokens[0] for item, _ in items]


def cut(pair: Pair, clip: Clip) -> tuple[Item, Tensor]:
    """Random frames, cut by the tower, and as pixel values by the family's own processor."""
    tower, video = pair.tower, pair.tower.spec.video
    assert isinstance(tower, PackedTower)
    assert video
    grid, patch = video.plan(clip).grid_thw, tower.sizing.patch_size
    clip = replace(clip, size=Size(grid[2] * patch, grid[1] * patch))  # of whole blocks already
    assert video.plan(clip).grid_thw == grid
    generator = torch.Generator().manual_seed(clip.frames)
    frames = torch.randint(
        *(0, 256, (len(video.indices(clip)), 3, clip.size.height, clip.size.width)),
        generator=generator,
        dtype=torch.uint8,
    )
    mean, std = (torch.tensor(each)[:, None, None] for each in (tower.spec.mean, tower.spec.std))
    pixels, *_ = Qwen3VLVideoProcessor.patchify(
        None, ((frames / 255 - mean) / std)[None], patch, tower.sizing.merge_size, video.group
    )
    return patchify_video(tower.spec, clip, frames), pixels[0]


def image(pair: Pair, size: Size) -> tuple[Item, Tensor]:
    plan = pair.tower.spec.sizing.plan(size)
    (_, row_bytes), _ = pair.tower.inputs("default", 1, 1)["patches"]
    generator = np.random.default_rng(size.width)
    patches = generator.integers(0, 256, (plan.patches, row_bytes), dtype=np.uint8)
    return Item(plan, patches), theirs(pair, [plan], torch.from_numpy(patches))


def assert_equal(
    family: str, graphs: GraphSet, budget: int | None, pack: Sequence[tuple[Item, Tensor]]
) -> None:
    items = [item for item, _ in pack]
    rows = graphs.tower.postprocess([graphs.run(budget, items)], [item.plan for item in items])
    check(family, rows, torch.cat([expected for _, expected in pack]))


def test_through_graphs_and_eagerly(pair: Pair, videos: list[tuple[Item, Tensor]]) -> None:
    first, second = image(pair, Size(96, 120)), image(pair, Size(200, 64))
    segments = Segments(items=4, frames=64, frame_tokens=4)
    graphs = GraphSet(pair.tower, "default", (256, 1024), segments, Device())
    graphs.capture(lambda budget, seconds: None)
    for pack in ([videos[0]], [first, videos[1], second], videos, [first, second]):
        tokens = sum(computed(pack))
        for budget in (None, *(each for each in (256, 1024) if each >= tokens)):
            assert_equal(pair.model_type, graphs, budget, pack)


def test_captured_when_a_layout_comes_again(pair: Pair, videos: list[tuple[Item, Tensor]]) -> None:
    segments = Segments(items=4, frames=64, frame_tokens=4)
    graphs = ExactGraphSet(pair.tower, "default", (1024,), segments, Device(), most=2)
    graphs.capture(lambda budget, seconds: None)
    for _ in range(3):
        assert_equal(
            pair.model_type, graphs, 1024, [videos[0], image(pair, Size(96, 120)), videos[2]]
        )
    assert graphs.captured() == 1


def test_beyond_a_pack_in_runs(pair: Pair, videos: list[tuple[Item, Tensor]]) -> None:
    items = [*videos, image(pair, Size(96, 120))]
    segments = [max(segments_of(item.plan)) for item, _ in items]
    largest = max(segments) // 4
    room = Capacity(((16, largest),), (largest,), items=4, frames=largest // 4, frame_tokens=4)
    device, metrics = Device(), EncoderMetrics()
    engine = Engine(pair.tower, capture(pair.tower, room, device, metrics), room, device, metrics)
    answers = [engine.submit(item) for item, _ in items]
    for (_, expected), answer in zip(items, answers, strict=True):
        assert answer.result(60).source == "graph"
        check(pair.model_type, video_chunks.rows_of(answer.result()), expected)
    engine.close()
    assert any(isinstance(item.rows, tuple) for item, _ in items)


def test_images_alone_have_no_inputs_of_videos(pair: Pair) -> None:
    segments = Segments(items=4, frames=64, frame_tokens=4)
    graphs = GraphSet(pair.tower, "default", (256,), segments, Device())
    images = graphs.budget_shapes(256, videos=False)
    videos = graphs.budget_shapes(256, videos=True)
    assert not {"later", "pooled"} & images.keys()
    assert images["segment_ends"][0] == (4,)
    if pair.tower.spec.video:
        assert videos["segment_ends"][0] == (68,)
    else:
        assert graphs.forms == (False,)
