"""LLaVA-NeXT, -Video and -OneVision against transformers: tokens, tiles, rows, both namings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)

from actors.engine import video_chunks
from actors.engine.budgets import Capacity, Segments
from actors.engine.device import Device
from actors.engine.engine import Engine
from actors.engine.graphs import capture
from actors.errors import TooLarge
from actors.families.llava_onevision import spec as onevision_spec
from actors.families.llava_onevision.tower import OnevisionTower
from actors.families.registry import read
from actors.media.patchify import cut_tiles, patchifier_of
from actors.models.load import load
from actors.options import ModelOptions
from actors.spec.checkpoint import Preset
from actors.spec.tiles import AnyresSizing
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Clip, Item, Size
from tests.checkpoints_clip import (
    PICTURE,
    TOWER,
    write_granite4,
    write_llava_next,
    write_llava_next_video,
    write_llava_qwen,
    write_onevision,
)
from tests.images import item_of, opened
from tests.parity.graphs import captured
from tests.parity.table import check
from tests.parity.test_published import onevision
from tests.parity.test_tiled import pixels
from tests.patches import patches_of
from tests.videos import patchify_video


def dummy(preset: str) -> ModelOptions:
    return ModelOptions(id=preset, load_format="dummy")


PUBLISHED = read(dummy("llava-onevision-7b"))

SIZES = [Size(60, 60), Size(300, 200), Size(90, 270), Size(250, 40), Size(700, 690), Size(100, 91)]
"""One tile and up to nine, padded above or at the sides, and scaled down."""

CHECKPOINTS: dict[str, Callable[[Path], Any]] = {
    "llava_onevision": write_onevision,
    "llava_qwen": write_llava_qwen,
    "llava_next_video": write_llava_next_video,
}


@dataclass(frozen=True)
class Pair:
    """The same weights in transformers' model and in our tower."""

    model: Any
    tower: OnevisionTower


@pytest.fixture(scope="module", params=CHECKPOINTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """float32 on the CPU."""
    folder = tmp_path_factory.mktemp(request.param)
    model = CHECKPOINTS[request.param](folder)
    with pytest.MonkeyPatch.context() as patch:
        small = onevision_spec.ONEVISION | TOWER | {"image_size": PICTURE}
        patch.setitem(onevision_spec.QWEN_TOWERS, "small", small)
        tower = load(ModelOptions(id=str(folder), dtype="float32"), torch.device("cpu"))
    assert isinstance(tower, OnevisionTower)
    assert tower.spec.family == request.param
    return Pair(model, tower)


def image_of(tower: OnevisionTower, size: Size) -> Item:
    """Random pixels."""
    generator = torch.Generator().manual_seed(size.width)
    shape = (3, size.height, size.width)
    return item_of(
        patchifier_of(tower.spec), torch.randint(256, shape, dtype=torch.uint8, generator=generator)
    )


def video_of(tower: OnevisionTower, frames: int) -> Item:
    """Random pixels, chosen by the client."""
    generator = torch.Generator().manual_seed(frames)
    shape = (frames, 3, 50, 70)
    shown = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
    return patchify_video(tower.spec, Clip(Size(70, 50), frames, 1.0, chosen=True), shown)


@torch.no_grad()
def image_rows(pair: Pair, item: Item, size: Size) -> Tensor:
    """transformers', of one image."""
    tiles = pixels(pair.tower.spec, torch.as_tensor(item.patches))[None]
    own = torch.tensor([[size.height, size.width]])
    features = pair.model.get_image_features(tiles, own, return_dict=True)
    if hasattr(features, "deepstack_features"):
        return torch.cat([rows for _, (rows,) in features.deepstack_features], 1)
    (rows,) = features.pooler_output
    return torch.as_tensor(rows)


@torch.no_grad()
def video_rows(pair: Pair, item: Item) -> Tensor:
    """transformers', of one video."""
    frames = pixels(pair.tower.spec, torch.as_tensor(item.patches))[None]
    (rows,) = pair.model.model.get_video_features(frames, return_dict=True).pooler_output
    return torch.as_tensor(rows)


@pytest.mark.parametrize("spare", [None, 0, 3], ids=["eager", "exact", "spare"])
@pytest.mark.parametrize("sizes", [SIZES, SIZES[:1], SIZES[4:5]], ids=["six", "small", "large"])
def test_images_and_a_video_in_one_pack(
    pair: Pair, sizes: Sequence[Size], spare: int | None
) -> None:
    tower = pair.tower
    items = [image_of(tower, size) for size in sizes]
    exact = [image_rows(pair, *one) for one in zip(items, sizes, strict=True)]
    items.insert(1, video_of(tower, 3))
    exact.insert(1, video_rows(pair, items[1]))
    rows = encode(tower, items, spare)
    found = rows.split([item.plan.tokens for item in items])
    assert [len(one) for one in found] == [len(one) for one in exact]
    for one, other in zip(found, exact, strict=True):
        check(tower.spec.family, one, other)


@pytest.mark.parametrize(
    ("family", "write"),
    [
        pytest.param("llava_next", partial(write_llava_next, tower="clip"), id="clip"),
        pytest.param("llava_next", partial(write_llava_next, tower="siglip"), id="siglip"),
        pytest.param("granite4_vision", write_granite4, id="granite"),
    ],
)
def test_images_without_videos(family: str, write: Callable[[Path], Any], tmp_path: Path) -> None:
    model = write(tmp_path)
    tower = load(ModelOptions(id=str(tmp_path), dtype="float32"), torch.device("cpu"))
    assert isinstance(tower, OnevisionTower)
    items = [image_of(tower, size) for size in SIZES]
    exact = [image_rows(Pair(model, tower), *one) for one in zip(items, SIZES, strict=True)]
    assert [item.plan.tokens for item in items] == [len(one) for one in exact]
    for spare in (None, 0, 3):
        check(family, encode(tower, items, spare), torch.cat(exact))


def encode(tower: OnevisionTower, items: Sequence[Item], spare: int | None) -> Tensor:
    """Through a graph with so many tiles to spare, whose patches hold random bytes; or eagerly."""
    plans = [item.plan for item in items]
    tile = tower.sizing.tile_tokens
    budget = None
    if spare is not None:
        budget = sum(plan.path_tokens[0] for plan in plans) + spare * tile
    budgets = () if budget is None else (tile, budget)
    graphs = captured(tower, "default", budgets, Segments(9, frames=9))
    return tower.postprocess([graphs.run(budget, items)], plans)


@pytest.mark.parametrize("tiles", [2, 4, 40])
def test_a_video_in_runs_ends_as_a_whole_one(pair: Pair, tiles: int) -> None:
    tower, most = pair.tower, tiles * pair.tower.sizing.tile_tokens
    room = Capacity(((most,),), (most,), items=4, frames=40, frame_tokens=1)
    device, metrics = Device(), EncoderMetrics()
    engine = Engine(tower, capture(tower, room, device, metrics), room, device, metrics)
    items = [video_of(tower, 9), image_of(tower, SIZES[0]), video_of(tower, 1)]
    answers = [engine.submit(item) for item in items]
    exact = [video_rows(pair, items[0]), image_rows(pair, items[1], SIZES[0])]
    exact.append(video_rows(pair, items[2]))
    for answer, expected in zip(answers, exact, strict=True):
        encoded = answer.result(60)
        assert encoded.source == "graph"
        assert video_chunks.rows_of(encoded).shape == expected.shape
        check(tower.spec.family, video_chunks.rows_of(encoded), expected)
    runs = metrics.registry.get_sample_value("encoder_video_runs_total")
    assert runs == (0 if tiles == 40 else -(-9 // tiles))
    engine.close()


def test_tokens_are_those_of_the_processor() -> None:
    sizing = PUBLISHED.sizing
    assert isinstance(sizing, AnyresSizing)
    for width, height in product(range(2, 4000, 131), range(3, 4000, 127)):
        plan = sizing.plan(Size(width, height))
        assert plan.tokens == onevision(Size(width, height)), (width, height)
        assert plan.path_tokens[0] <= sizing.token_range()[1]


def test_a_line_is_refused() -> None:
    with pytest.raises(TooLarge, match="10000 x 1 pixels has nothing left"):
        PUBLISHED.sizing.plan(Size(10000, 1))


@pytest.mark.parametrize(
    "preset",
    [
        *("llava-onevision-7b", "llava-next-7b", "llava-next-video-7b"),
        "granite-vision-4.1-4b",
    ],
)
@pytest.mark.parametrize("size", [(600, 400), (1920, 1080), (300, 1100), (90, 70), (384, 384)])
def test_tiles_are_those_of_the_processor(size: tuple[int, int], preset: str) -> None:
    image, sizing = opened().resize(size), read(dummy(preset)).sizing
    assert isinstance(sizing, AnyresSizing)
    kind = LlavaOnevisionImageProcessorPil if "onevision" in preset else LlavaNextImageProcessorPil
    settings = Preset(preset).files["preprocessor_config.json"] | {"do_normalize": False}
    theirs = kind(**settings)(image, return_tensors="np")
    tiles = torch.from_numpy((theirs["pixel_values"][0] * 255).round().astype(np.uint8))
    side = sizing.tile_pixels
    expected = torch.cat([cut_tiles(tile[:, :side, :side], sizing) for tile in tiles])
    ours = patches_of(torch.from_numpy(np.array(image)).permute(2, 0, 1), sizing)
    difference = np.abs(ours.numpy().astype(np.int64) - expected.numpy().astype(np.int64))
    assert len(ours) == sizing.plan(Size(*size)).patches
    # To single pixels that Pillow rounds otherwise.
    assert difference.mean() < 0.2
    assert difference.max() <= 3


@pytest.mark.parametrize("size", [(600, 400), (1920, 1080), (300, 1100), (336, 336), (337, 90)])
def test_frames_are_cropped_as_by_the_processor(size: tuple[int, int]) -> None:
    """LlavaNextVideoVideoProcessor needs torchvision. Its steps are those of CLIP's processor."""
    image, model = opened().resize(size), read(dummy("llava-next-video-7b"))
    settings = Preset("llava-next-video-7b").files["preprocessor_config.json"]
    processor = CLIPImageProcessorPil(**settings | {"do_normalize": False})
    (tile,) = processor(image, return_tensors="np")["pixel_values"]
    assert isinstance(model.sizing, AnyresSizing)
    expected = cut_tiles(torch.from_numpy((tile * 255).round().astype(np.uint8)), model.sizing)
    frame = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    item = patchify_video(model, Clip(Size(*size), 1, 1.0, chosen=True), [frame])
    difference = np.abs(item.patches.astype(np.int64) - expected.numpy().astype(np.int64))
    assert difference.mean() < 0.2
    assert difference.max() <= 3


@pytest.mark.parametrize(
    ("preset", "tokens"), [("llava-onevision-7b", 32 * 196 + 1), ("llava-next-video-7b", 32 * 144)]
)
def test_frames_by_default(preset: str, tokens: int) -> None:
    video = read(dummy(preset)).video
    assert video
    assert video.plan(Clip(Size(640, 360), 900, 25.0)).tokens == tokens
