"""Sampling, sizes and times of videos against transformers' video processors, function by function.

The classes themselves need torchvision; their pure functions are taken out of their source.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import transformers
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize
from transformers.video_utils import VideoMetadata, default_sample_indices_fn

from actors.errors import TooLarge
from actors.spec.sampling import (
    Evenly,
    Middles,
    Paced,
    Sampling,
    Spread,
    Strided,
    Thinned,
    Thinning,
    Timed,
)
from actors.spec.sizing import ShrinkingSizing
from actors.spec.video import CanvasPixels, FramePixels, MeanTimes, PooledGroups, TotalPixels
from actors.types import Clip, Size

MODELS = Path(transformers.__file__).parent / "models"
QWEN = {"temporal_patch_size": 2, "min_frames": 4, "max_frames": 768, "num_frames": None}

FAMILIES: dict[str, tuple[Sampling, dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": (Spread(2, 4, 768), QWEN | {"fps": 2}, {}),
    "qwen2_vl": (Strided(2, 4, 768, 2), QWEN | {"fps": None}, {"fps": 2}),
    "glm4v": (Timed(2, 300), {"fps": 2, "max_duration": 300}, {}),
    "glm46v": (Thinning(2), {"temporal_patch_size": 2}, {}),
    "glm5_next": (Thinned(2, 2048), {"fps": 2, "max_duration": 0, "max_frames": 2048}, {}),
    "internvl": (Middles(8), {"num_frames": None, "initial_shift": True}, {"num_frames": 8}),
}
"""Ours; the processor's attributes; what it is called with."""


@lru_cache
def function(family: str, name: str) -> Callable[..., Any]:
    """A function, or a method, of the module of the family's video processor."""
    tree = ast.parse((MODELS / family / f"video_processing_{family}.py").read_text())
    (method,) = (
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name
    )
    names = {"math": math, "np": np, "torch": torch, "VideoMetadata": VideoMetadata}
    exec(compile(ast.Module([method], []), family, "exec"), names)
    found: Callable[..., Any] = names[name]
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fps", [1.0, 12.5, 29.97])
def test_the_same_frames_are_taken(family: str, fps: float) -> None:
    ours, attributes, arguments = FAMILIES[family]
    theirs = function(family, "sample_frames")
    for frames in (*range(8, 60), 191, 1000, 2221, 9000):
        metadata = VideoMetadata(total_num_frames=frames, fps=fps, duration=frames / fps)
        expected = theirs(SimpleNamespace(**attributes), metadata=metadata, **arguments)
        found = ours.indices(frames, fps)
        # torch.arange now and then has one more, of a frame beyond the last.
        assert found == [int(index) for index in expected if index < frames], frames
        assert len(found) <= ours.most


@pytest.mark.parametrize("fps", [1.0, 12.5, 29.97])
def test_kimi_takes_the_frames_of_its_own_code(fps: float) -> None:
    """moonshotai/Kimi-K2.5: KimiK25VisionProcessor.split_video_chunks, without its decoding."""
    for frames in (*range(1, 60), 191, 2221, 9000):
        sampled = max(round(frames * min(2.0, fps) / fps), 1)
        expected = np.linspace(0, frames - 1, sampled).round().astype(int).tolist()
        assert Paced(2.0, 9000).indices(frames, fps) == expected
        assert len(Paced(2.0, 7).indices(frames, fps)) == min(sampled, 7)


@pytest.mark.parametrize("most", [1, 8, 10, 32])
def test_frames_that_no_rule_of_its_own_chooses(most: int) -> None:
    for frames in (*range(1, 80), 191, 2221, 9000):
        metadata = VideoMetadata(total_num_frames=frames, fps=25.0)
        expected = default_sample_indices_fn(metadata, num_frames=min(most, frames))
        assert Evenly(most).indices(frames, 25.0) == expected.tolist()


@pytest.mark.parametrize("frames", [1, 3, 4, 9])
def test_groups_of_pictures(frames: int) -> None:
    frame = ShrinkingSizing(patch_size=14, merge_size=2, max_patches=64, max_side_patches=512)
    video = PooledGroups(Paced(2.0, 100), 14, 2, 4, pictures=frame)
    clip = Clip(Size(300, 200), frames, 1.0, chosen=True)
    plan, one = video.plan(clip), frame.plan(Size(300, 200))
    groups = video.groups(clip)
    assert [index for group in groups for index in group] == list(range(frames))
    assert all(len(group) == 4 for group in groups[:-1])
    assert plan.grid_thw == (len(groups), *one.grid_thw[1:])
    assert (plan.patches, plan.path_tokens) == (frames * one.patches, (frames * one.tokens,))
    assert (plan.tokens, plan.group_tokens) == (len(groups) * one.tokens, one.tokens)
    assert video.timestamps(clip) == [4.0 * group for group in range(len(groups))]


SIZES = [(96, 64), (1920, 1080), (20, 700), (1000, 10), (333, 517)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("frames", [2, 3, 5, 64, 768])
@pytest.mark.parametrize("most", [786432, 25165824])
def test_all_frames_share_the_pixels(size: tuple[int, int], frames: int, most: int) -> None:
    video = TotalPixels(Spread(2, 4, 768), 16, 2, 2, 131072, most)
    height, width = smart_resize(frames, size[1], size[0], 2, 32, 131072, most)
    assert video.resized(Size(*size), frames) == Size(width, height)
    longest = max(height, width) // 16
    assert longest <= video.longest_side_patches()
    # The bound on each frame that will be the default, as written there.
    capped = TotalPixels(Spread(2, 4, 768), 16, 2, 2, 131072, most, most_frame_tokens=768)
    each = max(min(768 * 32 * 32, most // frames), int(131072 * 1.05))
    height, width = smart_resize(frames, size[1], size[0], 2, 32, 131072, each * frames)
    assert capped.resized(Size(*size), frames) == Size(width, height)


@pytest.mark.parametrize("size", [(96, 64), (1920, 1080), (40, 700), (333, 517)])
@pytest.mark.parametrize("frames", [2, 10, 768])
@pytest.mark.parametrize("capped", [False, True])
def test_each_frame_has_its_pixels(size: tuple[int, int], frames: int, capped: bool) -> None:
    limits = {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28}
    tokens = 128000 if capped else 0
    smallest, largest = limits.values()
    video = FramePixels(Strided(2, 4, 768, 2), 14, 2, 2, smallest, largest, tokens)
    most = limits["longest_edge"]
    if capped:  # as in Qwen2VLVideoProcessor.resize, which needs torchvision
        share = int(128000 * 28 * 28 * 0.9) * 2 // frames
        most = max(min(most, share), int(limits["shortest_edge"] * 1.05))
    height, width = function("qwen2_vl", "smart_resize")(
        size[1], size[0], 28, limits["shortest_edge"], most
    )
    assert video.resized(Size(*size), frames) == Size(width, height)
    assert max(height, width) // 14 <= video.longest_side_patches()


@pytest.mark.parametrize("size", [*SIZES, (20, 30), (1, 9), (56, 56)])
@pytest.mark.parametrize("frames", [2, 3, 5, 64, 768])
@pytest.mark.parametrize("limits", [(16, 240000), (16, 3000), (900, 3000)])
def test_frames_on_a_canvas(size: tuple[int, int], frames: int, limits: tuple[int, int]) -> None:
    backend, pad = MagicMock(), MagicMock()
    smart = function("glm5_next", "smart_resize")
    theirs = function("glm5_next", "resize")
    given = {"TorchvisionBackend": backend, "tvF": pad, "smart_resize": smart, "SizeDict": Size}
    theirs.__globals__.update(given)
    video = torch.empty(1, frames, 3, size[1], size[0], device="meta")
    theirs(None, video, None, 28, 2, *limits)
    resized = backend.resize.call_args
    ours = CanvasPixels(Thinned(2, 2048), 14, 2, 2, *(2 * 28**2 * tokens for tokens in limits))
    shown, canvas = ours.shown(Size(*size), frames), ours.resized(Size(*size), frames)
    assert shown == (resized.args[2] if resized else Size(*size))
    assert pad.pad.call_args.args[1] == [
        *(0, 0, canvas.width - shown.width, canvas.height - shown.height)
    ]
    assert max(canvas.width, canvas.height) // 14 <= ours.longest_side_patches()


@pytest.mark.parametrize("frames", [4, 7, 50])
def test_times_of_groups(frames: int) -> None:
    video = MeanTimes(Spread(2, 4, 768), 16, 2, 2, 131072, 786432)
    clip = Clip(Size(64, 64), frames, 12.5)
    theirs = Qwen3VLProcessor._calculate_timestamps(None, list(video.indices(clip)), 12.5, 2)
    assert video.timestamps(clip) == theirs
    metadata = VideoMetadata(frames, fps=12.5, frames_indices=video.indices(clip))
    assert video.seconds_per_group(clip) == pytest.approx(2 / metadata.sampled_fps)
    starts = TotalPixels(Spread(2, 4, 768), 16, 2, 2, 131072, 786432).timestamps(clip)
    assert starts == metadata.timestamps[::2]


def test_aspects_beyond_the_limit_are_refused() -> None:
    video = TotalPixels(Spread(2, 4, 768), 16, 2, 2, 131072, 786432)
    with pytest.raises(TooLarge, match="aspect ratio"):
        video.resized(Size(10_000, 40), 4)
