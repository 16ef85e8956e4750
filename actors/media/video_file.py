"""Video files: what the container says, and the frames that are wanted of it. FFmpeg, by PyAV.

Only containers and codecs of this list are opened, and none that names other files. Frames come as
transformers' own PyAV reader gives them: without the rotation that some cameras write. Knows
nothing of models; neither torch nor Ray.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import av
import av.error
import numpy as np
import numpy.typing as npt

from actors.errors import InvalidMedia, UnsupportedMedia
from actors.types import Clip, Size

CODECS = frozenset({"h264", "hevc", "av1", "vp8", "vp9", "mpeg4", "mpeg2video", "mjpeg"})
CONTAINERS = "MP4, MOV, WebM, Matroska, AVI or MPEG-TS"
LEAST_SHARE = 0.9
"""Of the frames that a header declares, how many must be there: editing leaves some out."""
MARGIN_PIXELS = 128
"""That a codec may add to a side of the declared frame, to fill its blocks."""
FREE_PIXELS = 2**20
"""That a decoder may always have: MPEG-4's takes more than it shows."""
SYNC, PACKET_BYTES = 0x47, 188
"""Of MPEG-TS, which has no signature but this byte in this distance."""

av.logging.set_level(None)


def demuxer(data: bytes) -> str | None:
    """FFmpeg's name of the container, by its first bytes; None: not one that is read here."""
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return "mov"
    if data.startswith(b"\x1a\x45\xdf\xa3"):
        return "matroska"
    if data.startswith(b"RIFF") and data[8:12] == b"AVI ":
        return "avi"
    starts = data[: 3 * PACKET_BYTES : PACKET_BYTES]
    return "mpegts" if len(starts) == 3 and set(starts) == {SYNC} else None


@contextmanager
def opened(data: bytes) -> Iterator[tuple[Any, Any]]:
    """The container and its first video stream.

    Raises UnsupportedMedia for what is not read here; FFmpeg's errors, also those of the block that
    uses it, as InvalidMedia.
    """
    name = demuxer(data)
    if name is None:
        raise UnsupportedMedia(f"the file is not a video that is read here: send {CONTAINERS}")
    try:
        with av.open(BytesIO(data), format=name) as container:
            if not container.streams.video:
                raise InvalidMedia("the file has no video stream")
            stream = container.streams.video[0]
            context = stream.codec_context
            codec = context.codec.canonical_name if context else "of no known name"
            if codec not in CODECS:
                raise UnsupportedMedia(
                    f"the codec {codec} is not supported: use {', '.join(sorted(CODECS))}"
                )
            context.thread_count = 1  # the threads are for many videos
            # A frame may be far larger than the header that was admitted says.
            width, height = stream.width + MARGIN_PIXELS, stream.height + MARGIN_PIXELS
            context.options = {"max_pixels": str(max(width * height, FREE_PIXELS))}
            yield container, stream
    except (av.error.FFmpegError, ValueError, IndexError) as error:
        reason = f"the video cannot be read, it is truncated or corrupt: {error}"
        raise InvalidMedia(reason) from error


def read_clip(data: bytes, most_frames: int) -> Clip:
    """Size, frames and rate, as the header has them. No frame is asked for.

    Containers that do not say how many frames there are have their packets counted, up to one over
    `most_frames`. Raises UnsupportedMedia, InvalidMedia.
    """
    with opened(data) as (container, stream):
        size = Size(stream.width, stream.height)
        frames = stream.frames
        if not frames:
            for packet in container.demux(stream):
                frames += packet.size > 0
                if frames > most_frames:
                    break
        rate = float(stream.average_rate or stream.guessed_rate or 0)
    if min(size.width, size.height, frames) <= 0 or not rate > 0:
        raise InvalidMedia("the header of the video lacks its size, its frames or their rate")
    return Clip(size, frames, rate)


@dataclass(frozen=True, slots=True)
class Index:
    """When each frame of a stream is shown, and where decoding can begin, both ascending."""

    shown: Sequence[int]
    starts: Sequence[int]
    timed: bool
    """False: the packets do not say when; frames are numbered as they come."""


def index(container: Any, stream: Any) -> Index:
    """From the packets alone. Leaves the container at its end."""
    jumps = container.format.name != "mpegts"  # which has no index: seeking in it is a guess
    packets = []
    # What is cut off in the middle ends here; whether enough is left is for the caller to see.
    with suppress(av.error.InvalidDataError, av.error.EOFError):
        for packet in container.demux(stream):
            if packet.size and not packet.is_discard:
                packets.append((packet.pts, packet.is_keyframe))
    times = [time for time, _ in packets]
    if None in times or len(set(times)) < len(times):
        return Index(range(len(times)), (), timed=False)
    starts = sorted(time for time, key in packets if key and jumps)
    return Index(sorted(times), starts, timed=True)


def frames(data: bytes, clip: Clip, wanted: Sequence[int]) -> Iterator[npt.NDArray[np.uint8]]:
    """The wanted frames, ascending: uint8 [height, width, 3]. Holds one at a time.

    Between two of them it skips to the nearest frame where decoding can begin. Raises InvalidMedia
    where the file is not what its header says.
    """
    with opened(data) as (container, stream):
        found = index(container, stream)
    with opened(data) as (container, stream):
        if not found.shown or len(found.shown) < LEAST_SHARE * clip.frames:
            raise InvalidMedia(
                f"the video ends after {len(found.shown)} of the {clip.frames} frames that its "
                "header declares: it is truncated"
            )
        last = len(found.shown) - 1
        times = [found.shown[min(place, last)] for place in wanted]
        for frame in at(container, stream, found, times):
            if (frame.width, frame.height) != (clip.size.width, clip.size.height):
                raise InvalidMedia(
                    f"a frame of the video has {frame.width} x {frame.height} pixels, not the "
                    f"{clip.size.width} x {clip.size.height} of its header: encode it again"
                )
            yield frame.to_ndarray(format="rgb24")


def at(container: Any, stream: Any, found: Index, times: Sequence[int]) -> Iterator[Any]:
    """The frame shown at each of these times, ascending; where there is none, the next, or else the
    last.
    """
    frame, now = None, found.shown[0] - 1
    coming = decoded(container, stream, timed=found.timed)
    for time in times:
        place = bisect_right(found.starts, time) - 1
        if place > 0 and found.starts[place] > now:
            container.seek(found.starts[place], stream=stream)
            coming = decoded(container, stream, timed=found.timed)
            now = found.starts[place] - 1
        while now < time and (step := next(coming, None)):
            now, frame = step
        if frame is None:
            raise InvalidMedia("no frame of the video can be decoded: it is truncated or corrupt")
        yield frame


def decoded(container: Any, stream: Any, *, timed: bool) -> Iterator[tuple[int, Any]]:
    """Frames from where the container is, with their times or numbers."""
    for number, frame in enumerate(container.decode(stream)):
        if not timed:
            yield number, frame
        elif frame.pts is not None:
            yield frame.pts, frame
