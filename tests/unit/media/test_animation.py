"""Animated GIF and WebP as videos: when each frame is shown, and exactly the frames wanted."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from actors.errors import InvalidMedia, ServiceError, TooLarge, UnsupportedMedia
from actors.families import registry
from actors.media.animation import LEAST_STEP_MS, MOST_BLOCKS, read_animation
from actors.media.image import animation_frames, decode, prepare
from actors.media.patchify import patchifier_of
from actors.options import ModelOptions
from actors.types import Clip, Size
from encoder_service.config import LimitOptions
from encoder_service.intake.media import probe
from tests.images import animated, encoded
from tests.videos import number, numbered, picture

MODEL = registry.read(ModelOptions(id="qwen3vl-tiny", load_format="dummy"))
FORMATS = ["GIF", "WEBP"]
UNEVEN = [200, 50, 50, 400, 300]


def animation(format: str, durations: list[int]) -> bytes:
    """Its frames say which they are."""
    first, *later = [Image.fromarray(numbered(i, 128, 64)) for i in range(len(durations))]
    return encoded(first, format, save_all=True, append_images=later, duration=durations)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("durations", "frames", "fps"),
    [
        ([80] * 6, 6, 12.5),
        (UNEVEN, 20, 20.0),
        ([40, 30, 60], 13, 100.0),
        ([0, 10, 100], 3, 10.0),  # no time for a frame: browsers give it 100 ms
    ],
    ids=str,
)
def test_the_frame_that_is_shown_at_each_time_comes(
    format: str, durations: list[int], frames: int, fps: float
) -> None:
    data = animation(format, durations)
    media = probe(data, "video", MODEL, LimitOptions())
    assert media.clip == Clip(Size(128, 64), frames, fps)
    assert (media.kind, media.notice, media.alpha) == ("video", "", "drop")
    ends = np.cumsum([one if one > LEAST_STEP_MS else 100 for one in durations])
    shown = [int(np.sum(ends <= 1000 * index / fps)) for index in range(frames)]
    wanted = list(range(frames))
    found = animation_frames(data, media.clip, wanted, "white")
    assert [number(pixels) for pixels in found] == shown
    few = animation_frames(data, media.clip, wanted[1::3], "white")
    assert [number(pixels) for pixels in few] == shown[1::3]


def test_times_too_uneven_for_one_step_are_sampled_every_hundredth_of_a_second() -> None:
    found = read_animation(animation("WEBP", [33, 34, 33]), 1000)
    assert found.clip(Size(1, 1)) == Clip(Size(1, 1), 10, 100.0)
    assert found.places(list(range(10))) == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_a_slow_frame_has_as_many_samples_as_it_lasts() -> None:
    data = animation("GIF", [1000, 3000])
    media = probe(data, "video", MODEL, LimitOptions())
    assert MODEL.video
    assert media.clip
    times = MODEL.video.timestamps(media.clip)
    assert len(times) == media.plan.frames == 2
    assert 0 <= times[0] < times[1] < 4
    assert prepare(patchifier_of(MODEL), media).plan == media.plan


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("alpha", ["white", "black"])
def test_transparent_pixels_are_composited_in_every_frame(format: str, alpha: str) -> None:
    circles = []
    for index in range(3):
        layer = Image.fromarray(picture(index, 64, 48)).convert("RGBA")
        layer.putalpha(Image.new("L", (64, 48), 0))
        layer.paste((200, 30, 40, 255), (8 * index, 8, 8 * index + 20, 40))
        circles.append(layer)
    first, *later = circles
    made = {"disposal": 2} if format == "GIF" else {"lossless": True}
    data = encoded(first, format, save_all=True, append_images=later, duration=100, **made)
    media = probe(data, "video", MODEL, LimitOptions(), alpha)  # type: ignore[arg-type]
    assert media.notice == f"transparency is composited on {alpha} (preprocess.alpha)"
    assert media.clip
    for pixels, layer in zip(
        animation_frames(data, media.clip, [0, 1, 2], media.alpha), circles, strict=True
    ):
        canvas = Image.new("RGBA", layer.size, alpha)
        assert np.array_equal(pixels, np.array(Image.alpha_composite(canvas, layer).convert("RGB")))


@pytest.mark.parametrize("format", FORMATS)
def test_the_first_frame_is_what_the_image_is(format: str) -> None:
    data = animated(format, 3)
    clip = probe(data, "video", MODEL, LimitOptions()).clip
    assert clip
    (first,) = animation_frames(data, clip, [0], "white")
    assert np.array_equal(first, decode(data, "white").permute(1, 2, 0).numpy())


@pytest.mark.parametrize("format", FORMATS)
def test_one_frame_is_an_image(format: str) -> None:
    with pytest.raises(UnsupportedMedia, match="is not animated: send it as an image"):
        probe(animated(format, 1), "video", MODEL, LimitOptions())


@pytest.mark.parametrize("format", FORMATS)
def test_damaged_files_are_the_clients_fault(format: str) -> None:
    data, cutter = animation(format, UNEVEN), patchifier_of(MODEL)
    for place in range(8, len(data), 7):
        for damaged in (data[:place], data[:place] + b"\xff\0\xff" + data[place + 3 :]):
            with suppress(ServiceError):  # nothing else may be raised
                media = probe(damaged, "video", MODEL, LimitOptions())
                assert prepare(cutter, media).plan == media.plan
    with pytest.raises(InvalidMedia, match="truncated"):
        read_animation(data[: len(data) // 2], 1000)


def test_frames_are_limited() -> None:
    data = animation("GIF", [500] * 9)
    with pytest.raises(TooLarge, match=r"has 9 frames or more.*limits.max_video_frames"):
        probe(data, "video", MODEL, LimitOptions(max_video_frames=8))
    with pytest.raises(TooLarge, match=r"limits.max_video_seconds"):
        probe(data, "video", MODEL, LimitOptions(max_video_seconds=4))


@pytest.mark.parametrize(
    "data",
    [
        b"GIF89a\x01\0\x01\0\0\0\0" + bytes(10_000_000),
        b"GIF89a\x01\0\x01\0\0\0\0" + b"!\xfe\0" * (MOST_BLOCKS + 1),
        b"GIF89a\x01\0\x01\0\0\0\0!\xfe" + b"\x01a" * 5_000_000 + b"\0",
        b"RIFF\xf0\xff\xff\xffWEBP" + bytes(10_000_000),
    ],
    ids=["junk", "extensions", "blocks", "chunks"],
)
def test_files_made_to_be_slow_take_no_time(data: bytes) -> None:
    started = time.process_time()
    with pytest.raises((InvalidMedia, UnsupportedMedia)):
        read_animation(data, 1000)
    assert time.process_time() - started < 2


def test_another_animation_than_was_admitted_is_refused() -> None:
    media = probe(animation("GIF", UNEVEN), "video", MODEL, LimitOptions())
    with pytest.raises(ServiceError):
        prepare(patchifier_of(MODEL), replace(media, data=animation("GIF", [200, 50])))


def by_hand(*sizes: int) -> bytes:
    """A GIF as other programs write it: comments, no control block, a palette for each frame."""
    frames = []
    for index, side in enumerate(sizes):
        data = encoded(Image.fromarray(picture(index, side, side)).convert("P"), "GIF")
        start, palette = data.index(b"\x2c"), data[13 : 13 + 768]
        frames.append(data[start : start + 9] + b"\x87" + palette + data[start + 10 : -1])
    comment = b"!\xfe\x05hello\0"
    return b"GIF89a\x20\0\x20\0\0\0\0" + comment + comment.join(frames) + b";"


def test_files_from_elsewhere() -> None:
    data = by_hand(32, 32, 32)
    media = probe(data, "video", MODEL, LimitOptions())
    assert media.clip == Clip(Size(32, 32), 3, 10.0)
    assert len(list(animation_frames(data, media.clip, [0, 1, 2], "drop"))) == 3


def test_frames_larger_than_was_admitted_are_refused() -> None:
    media = probe(by_hand(32, 32), "video", MODEL, LimitOptions())
    with pytest.raises(InvalidMedia, match="larger than its header says"):
        prepare(patchifier_of(MODEL), replace(media, data=by_hand(32, 40)))


def test_a_frame_beyond_the_canvas_is_refused() -> None:
    file = animated("GIF", 3)
    with pytest.raises(InvalidMedia, match="larger than its header says"):
        read_animation(file[:6] + b"\x01\x00" + file[8:], 10)


def test_frames_are_limited_by_their_pixels_together(monkeypatch: pytest.MonkeyPatch) -> None:
    file = animated("GIF", 3)
    spec = registry.read(ModelOptions(id="qwen3vl-tiny", load_format="dummy"))
    monkeypatch.setattr("encoder_service.intake.media.MOST_ANIMATED_PIXELS", 100)
    with pytest.raises(TooLarge, match=r"has 3 frames .* send a video file"):
        probe(file, "video", spec, LimitOptions())


def test_the_parts_of_a_frame_are_limited() -> None:
    file = animated("GIF", 2)
    with pytest.raises(InvalidMedia, match="too many blocks"):
        read_animation(file[:-1] + b"!\xfe" + b"\x01a" * MOST_BLOCKS + b"\x00;", 10)
