"""Video files: headers without decoding, and exactly the frames that are wanted."""

from __future__ import annotations

from contextlib import suppress
from fractions import Fraction
from io import BytesIO
from typing import Any

import av
import pytest

from actors.errors import InvalidMedia, UnsupportedMedia
from actors.media.video_file import demuxer, frames, read_clip
from actors.types import Clip, Size
from tests import images
from tests.videos import number, video

FILES: dict[str, dict[str, Any]] = {
    "mp4": {"g": "12", "bf": "2"},
    "fragments": {"container": "ismv"},
    "mov": {"container": "mov", "codec": "mpeg4", "g": "10"},
    "mkv": {"container": "matroska", "g": "7"},
    "webm": {"container": "webm", "codec": "libvpx-vp9", "g": "9"},
    "avi": {"container": "avi", "codec": "mpeg4", "g": "10"},
    "ts": {"container": "mpegts", "g": "12"},
}


@pytest.fixture(scope="module", params=FILES)
def counting(request: pytest.FixtureRequest) -> bytes:
    """Fifty frames that say which they are."""
    return video(50, size=(128, 64), counting=True, **FILES[request.param])


def test_the_header_tells(counting: bytes) -> None:
    assert read_clip(counting, 1000) == Clip(Size(128, 64), 50, 10.0)


def test_counting_ends_where_there_are_too_many(counting: bytes) -> None:
    assert read_clip(counting, 20).frames > 20


@pytest.mark.parametrize(
    "wanted",
    [range(50), [0, 49], [13, 13, 14, 40], [49, 49], [0, 7, 14, 21, 28, 35, 42], [25, 30]],
    ids=str,
)
def test_the_wanted_frames_come(counting: bytes, wanted: list[int]) -> None:
    clip = read_clip(counting, 1000)
    assert [number(pixels) for pixels in frames(counting, clip, wanted)] == list(wanted)


@pytest.mark.parametrize(("hidden", "counted"), [(3, 50), (30, 20)])  # few still count
def test_frames_that_an_edit_list_hides_do_not_count(hidden: int, counted: int) -> None:
    """What a phone or `ffmpeg -c copy` leaves of a video that was trimmed at its start."""
    clip = read_clip(data := trimmed(hidden), 1000)
    assert clip.frames == counted
    assert [number(pixels) for pixels in frames(data, clip, [0, 7])] == [hidden, hidden + 7]


def trimmed(hidden: int) -> bytes:
    file, whole = BytesIO(), video(50, size=(128, 64), counting=True, codec="mpeg4", g="50")
    with av.open(BytesIO(whole), "r") as given, av.open(file, "w", format="mp4") as output:
        stream = output.add_stream_from_template(given.streams.video[0])
        for packet in given.demux(video=0):
            if packet.size and packet.pts is not None and packet.dts is not None:
                ticks = round(hidden / 10 / packet.time_base)
                packet.pts -= ticks
                packet.dts -= ticks
                packet.stream = stream
                output.mux(packet)
    return file.getvalue()


@pytest.mark.parametrize("container", ["mp4", "matroska", "avi"])
def test_titles_need_not_be_utf_8(container: str) -> None:
    data = video(5, codec="mpeg4", container=container)
    assert b"Lavf" in data, "the muxer's name, which it writes as metadata"
    data = data.replace(b"Lavf", b"L\xe4vf")
    clip = read_clip(data, 1000)
    assert len(list(frames(data, clip, range(5)))) == 5


def test_truncated_files_say_so(counting: bytes) -> None:
    clip = read_clip(counting, 1000)
    with pytest.raises(InvalidMedia, match="truncated"):
        list(frames(counting[: len(counting) // 2], clip, [0, 25, 49]))


@pytest.mark.parametrize(
    "data", [b"", b"hello" * 500, images.jpeg(50, 50), b"#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1/x\n"]
)
def test_other_files_are_not_opened(data: bytes) -> None:
    assert demuxer(data) is None
    with pytest.raises(UnsupportedMedia, match="send MP4"):
        read_clip(data, 1000)


@pytest.mark.parametrize("cut", [0.1, 0.5, 0.9])
def test_damaged_files_are_the_clients_fault(counting: bytes, cut: float) -> None:
    place = int(cut * len(counting))
    damaged = counting[:place] + bytes(200) + counting[place + 200 :]
    with suppress(InvalidMedia, UnsupportedMedia):  # nothing else may be raised
        clip = read_clip(damaged, 1000)
        shown = list(frames(damaged, clip, range(0, clip.frames, 5)))
        assert {pixels.shape for pixels in shown} == {(64, 128, 3)}


def test_codecs_beyond_the_list_are_named() -> None:
    with pytest.raises(UnsupportedMedia, match="codec ffv1 is not supported"):
        read_clip(video(3, container="matroska", codec="ffv1"), 1000)


def of_jpegs(*files: bytes) -> bytes:
    """A video that declares 64 x 64 pixels, whatever its frames are."""
    file = BytesIO()
    with av.open(file, "w", format="avi") as output:
        stream = output.add_stream("mjpeg", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuvj420p"
        for time, data in enumerate(files):
            packet = av.Packet(data)
            packet.stream, packet.time_base, packet.is_keyframe = stream, Fraction(1, 10), True
            packet.pts = packet.dts = time
            output.mux(packet)
    return file.getvalue()


@pytest.mark.parametrize(
    ("side", "message"),
    [
        (80, "80 x 80 pixels, not the 64 x 64"),
        (1200, "avcodec_send_packet"),  # the decoder refuses: no memory is taken for it
    ],
)
def test_frames_larger_than_was_admitted_are_refused(side: int, message: str) -> None:
    data = of_jpegs(*[images.jpeg(64, 64)] * 6, images.jpeg(side, side))
    clip = read_clip(data, 1000)
    assert clip.size == Size(64, 64)
    with pytest.raises(InvalidMedia, match=message):
        list(frames(data, clip, [0, 6]))
