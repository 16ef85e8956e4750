"""Reads the headers of video files, and decodes chosen frames, with FFmpeg through PyAV.

Only the containers and codecs listed here are opened, none of which can refer to other files.
Frames equal those of transformers' PyAV reader, which ignores the rotation that cameras record.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Literal

import av
import av.error
import numpy as np
import numpy.typing as npt

from actors.errors import InvalidMedia, UnsupportedMedia
from actors.types import Clip, Size

CODECS = frozenset({"h264", "hevc", "av1", "vp8", "vp9", "mpeg4", "mpeg2video", "mjpeg"})
DECODERS = CODECS | {"libdav1d"}
CONTAINERS = "MP4, MOV, WebM, Matroska, AVI, MPEG-TS, or an animated GIF or WebP"
LEAST_SHARE = 0.9  # the share of the declared frames that must exist
MARGIN_PIXELS = 128  # what a codec may add to each side of the declared frame, to fill its blocks
FREE_PIXELS = 2**20  # what a decoder may always allocate: MPEG-4's needs more than a small frame
SYNC, PACKET_BYTES = 0x47, 188  # the only signature of MPEG-TS: this byte at this distance

av.logging.set_level(None)


def demuxer(data: bytes) -> str | None:
    """FFmpeg's name of the container, from the first bytes; None: not supported."""
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return "mov"
    if data.startswith(b"\x1a\x45\xdf\xa3"):
        return "matroska"
    if data.startswith(b"RIFF") and data[8:12] == b"AVI ":
        return "avi"
    starts = data[: 3 * PACKET_BYTES : PACKET_BYTES]
    return "mpegts" if len(starts) == 3 and set(starts) == {SYNC} else None


@contextmanager
def first_stream(
    data: bytes,
    kind: Literal["video", "audio"],
    name: str | None,
    containers: str,
    codecs: Collection[str],
    decoders: Collection[str],
) -> Iterator[tuple[Any, Any]]:
    """The container and its first stream of a kind. Raises UnsupportedMedia; errors of FFmpeg, also
    within the `with` block, become InvalidMedia.

    `name`: FFmpeg's of the container. `containers`: those that are supported, for the message.
    `decoders`: FFmpeg's names of the decoders that it may use while it opens the file. Otherwise it
    would decode streams that are not checked, such as the cover of an MP3.
    """
    if name is None:
        raise UnsupportedMedia(f"the file is not in a supported {kind} format: send {containers}")
    only = {"codec_whitelist": ",".join(decoders)}
    file = BytesIO(data)
    try:
        # Titles may be in any encoding.
        with av.open(
            file, format=name, container_options=only, metadata_errors="replace"
        ) as container:
            stream = next((one for one in container.streams if one.type == kind), None)
            if stream is None:
                raise InvalidMedia(f"the file has no {kind} stream")
            context = stream.codec_context
            codec = context.codec.canonical_name if context else "of no known name"
            if codec not in codecs:
                raise UnsupportedMedia(
                    f"the codec {codec} is not supported: use {', '.join(sorted(codecs))}"
                )
            context.thread_count = 1  # one thread per file: several are decoded at a time
            yield container, stream
    except (av.error.FFmpegError, ValueError, IndexError) as error:
        raise InvalidMedia(
            f"the {'sound' if kind == 'audio' else kind} cannot be read, it is truncated or "
            f"corrupt: send the whole file, or encode it again ({error})"
        ) from error


@contextmanager
def opened(data: bytes) -> Iterator[tuple[Any, Any]]:
    """The container and its first video stream: see `first_stream`."""
    with first_stream(data, "video", demuxer(data), CONTAINERS, CODECS, DECODERS) as found:
        _, stream = found
        # Frames may be far larger than in the header, on which the limits were checked.
        width, height = stream.width + MARGIN_PIXELS, stream.height + MARGIN_PIXELS
        stream.codec_context.options = {"max_pixels": str(max(width * height, FREE_PIXELS))}
        yield found


def read_clip(data: bytes, most_frames: int) -> Clip:
    """Size, frame count and rate from the header, without decoding any frame.

    If the container does not declare a frame count, or an edit list hides frames, packets are
    counted, at most `most_frames` + 1. Raises UnsupportedMedia, InvalidMedia.
    """
    with opened(data) as (container, stream):
        size = Size(stream.width, stream.height)
        rate = float(stream.average_rate or stream.guessed_rate or 0)
        frames, seconds = stream.frames, float((stream.duration or 0) * (stream.time_base or 0))
        # A video that was cut without encoding it again still declares the frames that were cut.
        if not frames or 0 < seconds * rate < LEAST_SHARE * frames:
            frames = 0
            for packet in container.demux(stream):
                frames += packet.size > 0 and not packet.is_discard
                if frames > most_frames:
                    break
    if min(size.width, size.height, frames) <= 0 or not rate > 0:
        raise InvalidMedia("the header of the video lacks its size, its frames or their rate")
    return Clip(size, frames, rate)


@dataclass(frozen=True, slots=True)
class Index:
    """Presentation times of all frames, and of those that decoding can start from, ascending."""

    shown: Sequence[int]
    starts: Sequence[int]
    timed: bool  # False: packets carry no usable times, and frames are numbered in order of arrival


def index(container: Any, stream: Any) -> Index:
    """Reads all packets of the container, without decoding them."""
    jumps = container.format.name != "mpegts"  # which has no index, so that seeking is a guess
    packets = []
    # A truncated file ends here. The caller checks whether enough frames are left.
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
    """Decodes frames one at a time: uint8 [height, width, 3]. `wanted` ascends. Raises InvalidMedia
    if the file does not match its header."""
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
    """For each of these ascending times, the first frame from that time on, or else the last."""
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
    """The frames from the current position, each with its time or number."""
    for number, frame in enumerate(container.decode(stream)):
        if not timed:
            yield number, frame
        elif frame.pts is not None:
            yield frame.pts, frame
