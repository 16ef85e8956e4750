"""What a request may say, against transformers' processors called with the same keywords."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers.video_utils import VideoMetadata, default_sample_indices_fn

from actors.errors import InvalidOption
from actors.families.registry import read
from actors.media.patchify import cut_tiles, patchifier_of
from actors.models.layers.patches import places
from actors.options import ModelOptions
from actors.spec.model_spec import ModelSpec
from actors.spec.sampling import Evenly, Paced
from actors.spec.sizing import PackedSizing
from actors.spec.tiles import PaddedTiles, StretchedTiles
from actors.spec.video import TotalPixels
from actors.spec.views import CropSizing
from actors.types import Clip, Kind, ProcessorKwargs, Size
from tests import llama4
from tests.images import opened
from tests.parity.test_sampling import FAMILIES, function

SIZES = [(96, 64), (640, 427), (300, 1100)]
sides = st.integers(1, 4000)
pixels = st.integers(1, 4_000_000)


def asked(preset: str, kind: Kind = "image", **kwargs: Any) -> ModelSpec:
    model = read(ModelOptions(id=preset, load_format="dummy"))
    return model.asked(kind, ProcessorKwargs(**kwargs))


def processor(preset: str) -> tuple[Any, int]:
    """transformers' own, and how often it counts the pixels of an image."""
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
    from transformers.models.glm5_next.image_processing_pil_glm5_next import (
        Glm5NextImageProcessorPil,
    )
    from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
        PaddleOCRVLImageProcessorPil,
    )
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    classes = {
        "glm41v-9b": Glm4vImageProcessorPil,
        "glm53-flash": Glm5NextImageProcessorPil,
        "paddleocr-vl": PaddleOCRVLImageProcessorPil,
    }
    sides = {"patch_size": 16} if preset.startswith("qwen3") else {}
    made = classes.get(preset, Qwen2VLImageProcessorPil)(do_normalize=False, **sides)
    return made, 2 if preset.startswith("glm") else 1


@pytest.mark.parametrize(
    "preset", ["qwen2vl-7b", "qwen3vl-8b", "glm41v-9b", "glm53-flash", "paddleocr-vl"]
)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("limits", [(3136, 50176), (401408, 501760)], ids=str)
def test_pixels_of_images(preset: str, size: tuple[int, int], limits: tuple[int, int]) -> None:
    image, (theirs, times) = opened().resize(size), processor(preset)
    edges = dict(
        zip(("shortest_edge", "longest_edge"), (times * one for one in limits), strict=True)
    )
    given: dict[str, Any] = {"size": edges}
    if preset == "glm53-flash":
        tokens = [one // 28**2 for one in limits]
        given = dict(zip(("min_image_tokens", "max_image_tokens"), tokens, strict=True))
    expected = theirs(image, **given, return_tensors="np")
    if times == 1:
        words = {"min_pixels": limits[0], "max_pixels": limits[1]}
        with pytest.warns(FutureWarning, match="deprecated"):
            same = theirs(image, **words, return_tensors="np")
        assert same["image_grid_thw"].tolist() == expected["image_grid_thw"].tolist()
    model = asked(preset, min_pixels=limits[0], max_pixels=limits[1])
    plan, patches = patchifier_of(model).patchify(
        torch.from_numpy(np.array(image)).permute(2, 0, 1)
    )
    assert [list(plan.grid_thw)] == expected["image_grid_thw"].tolist()
    values = expected["pixel_values"]
    if preset == "paddleocr-vl":  # its processor's patches lie row by row, ours in merge blocks
        _, rows, columns = plan.grid_thw
        row, column = places(rows, columns, model.sizing.merge_size).T
        values = values[row * columns + column]
    frames = values.reshape(len(values), 3, -1, model.sizing.patch_size**2)[:, :, 0]
    difference = np.abs((frames.reshape(len(values), -1) * 255).round() - patches.numpy())
    assert difference.mean() < 0.2
    assert difference.max() <= 16


@given(sides, sides, pixels, pixels)
def test_any_range_of_pixels(width: int, height: int, one: int, other: int) -> None:
    from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as theirs

    limits = min(one, other), max(one, other)
    sizing = PackedSizing(14, 2, 3136, 1003520).asked(ProcessorKwargs(*limits))
    assume(max(width, height) <= 200 * min(width, height))
    rows, columns = theirs.smart_resize(height, width, 28, *limits)
    assert sizing.resized(Size(width, height)) == Size(columns, rows)
    assert max(rows, columns) // 14 <= sizing.longest_side_patches()


def test_a_range_follows_what_is_said() -> None:
    sizing = PackedSizing(14, 2, 3136, 1003520)
    lower = sizing.asked(ProcessorKwargs(max_pixels=784))
    assert (lower.min_pixels, lower.max_pixels) == (784, 784)
    with pytest.raises(InvalidOption, match="min_pixels: 2000000 is over max_pixels, 1003520"):
        sizing.asked(ProcessorKwargs(min_pixels=2_000_000))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("most", [1, 2, 7])
def test_tiles_of_internvl(size: tuple[int, int], most: int) -> None:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    image = opened().resize(size)
    edges = {"height": 448, "width": 448}
    theirs = GotOcr2ImageProcessorPil(size=edges, do_normalize=False, crop_to_patches=True)
    tiles = theirs(image, max_patches=most, return_tensors="np")["pixel_values"]
    model = asked("internvl3-8b", max_patches=most)
    assert isinstance(model.sizing, StretchedTiles)
    _, patches = patchifier_of(model).patchify(torch.from_numpy(np.array(image)).permute(2, 0, 1))
    cut = [
        cut_tiles(torch.from_numpy((tile * 255).round().astype(np.uint8)), model.sizing)
        for tile in tiles
    ]
    expected = torch.cat(cut).numpy().astype(np.int64)
    assert np.abs(expected - patches.numpy()).mean() < 0.2


@given(sides, sides, st.integers(1, 20))
def test_canvases_of_tiles_and_crops(width: int, height: int, most: int) -> None:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

    kwargs, size = ProcessorKwargs(max_patches=most), Size(width, height)
    tiles = PaddedTiles(336, 14, 2, 16).asked(kwargs)
    canvas = llama4.canvas(width, height, most)
    assert tuple(336 * one for one in tiles.layout(size)) == canvas
    crops = CropSizing(1024, StretchedTiles(640, 16, 4, max_tiles=9, min_tiles=2)).asked(kwargs)
    columns, rows = get_optimal_tiled_canvas((height, width), (640, 640), 2, most)
    cut = max(size.width, size.height) > 640 and rows * columns > 1
    assert crops.layout(size) == ((rows, columns) if cut else None)


@pytest.mark.parametrize("preset", ["kimivl-a3b", "kimik25"])
@given(width=st.integers(28, 4000), height=st.integers(28, 4000), most=st.integers(16, 4096))
def test_patches_of_kimi(preset: str, width: int, height: int, most: int) -> None:
    model = asked(preset, max_patches=most)
    _, padded = function("kimi_k25", "navit_resize")(height, width, 14, 2, most, 512)
    assert model.sizing.plan(Size(width, height)).grid_thw == (1, *(one // 14 for one in padded))


KWARGS: list[dict[str, Any]] = [
    *({"fps": fps} for fps in (0.5, 1, 3.7, 240)),
    *({"num_frames": frames} for frames in (2, 5, 16)),
]


@pytest.mark.parametrize(
    ("family", "kwargs"),
    [
        (family, kwargs)
        for family, (rule, _, _) in FAMILIES.items()
        for kwargs in KWARGS
        if kwargs.keys() <= rule.defaults().keys()
    ],
    ids=str,
)
def test_frames_of_videos(family: str, kwargs: dict[str, Any]) -> None:
    ours, attributes, _ = FAMILIES[family]
    rule, theirs = ours.asked(ProcessorKwargs(**kwargs)), function(family, "sample_frames")
    for frames, fps in ((20, 1.0), (60, 12.5), (191, 29.97), (2221, 25.0)):
        metadata = VideoMetadata(total_num_frames=frames, fps=fps, duration=frames / fps)
        found = rule.indices(frames, fps)
        if kwargs.get("fps", 0) > fps and family == "internvl":
            assert found == list(range(frames))  # theirs: an error
            continue
        expected = theirs(SimpleNamespace(**attributes), metadata=metadata, **kwargs)
        assert found == [int(index) for index in expected if index < frames]


@pytest.mark.parametrize("kwargs", KWARGS, ids=str)
def test_frames_that_no_rule_of_its_own_chooses(kwargs: dict[str, Any]) -> None:
    for frames in (30, 191, 2221):
        found = Evenly(32).asked(ProcessorKwargs(**kwargs)).indices(frames, 25.0)
        fewer = kwargs | ({"fps": 25.0} if kwargs.get("fps", 0) > 25 else {})
        metadata = VideoMetadata(total_num_frames=frames, fps=25.0)
        assert found == default_sample_indices_fn(metadata, **fewer).tolist()


def test_frames_of_kimi_by_another_rate() -> None:
    rule = Paced(2.0, 100).asked(ProcessorKwargs(fps=0.5))
    assert rule.indices(100, 10.0) == np.linspace(0, 99, 5).round().astype(int).tolist()
    assert asked("kimik25", "video", fps=0.5).video != asked("kimik25", "video").video


@pytest.mark.parametrize("size", [(96, 64), (1920, 1080), (333, 517)], ids=str)
@pytest.mark.parametrize("frames", [2, 5, 64])
@pytest.mark.parametrize("limits", [(3136, 50176), (401408, 501760)], ids=str)
def test_pixels_of_videos(size: tuple[int, int], frames: int, limits: tuple[int, int]) -> None:
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

    each = asked("qwen2vl-7b", "video", min_pixels=limits[0], max_pixels=limits[1]).video
    assert each
    height, width = function("qwen2_vl", "smart_resize")(size[1], size[0], 28, *limits)
    assert each.resized(Size(*size), frames) == Size(width, height)
    model = asked("qwen3vl-8b", "video", min_pixels=limits[0], max_pixels=limits[1])
    own = asked("qwen3vl-8b", "video").video
    assert model.video
    assert isinstance(own, TotalPixels)
    least, most = (max(own.min_pixels, frames * limits[0]), min(own.max_pixels, frames * limits[1]))
    height, width = smart_resize(frames, size[1], size[0], 2, 32, min(least, most), most)
    assert model.video.resized(Size(*size), frames) == Size(width, height)


def test_a_rate_of_less_than_a_frame_gives_a_group() -> None:
    clip = Clip(Size(64, 64), frames=100, fps=25.0)
    video = asked("glm41v-9b", "video", fps=0.001).video
    assert video
    assert video.plan(clip).frames == 1
