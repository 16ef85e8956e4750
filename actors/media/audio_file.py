"""Reads the length of sound files, and decodes them to mono at one rate, with FFmpeg through PyAV.

Only the containers and codecs listed here are opened. Channels are averaged, then resampled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from itertools import chain
from typing import Any

import av
import numpy as np
import numpy.typing as npt

from actors.errors import InvalidMedia, UnsupportedMedia
from actors.media.video_file import LEAST_SHARE, first_stream

PCM = (
    *("pcm_u8", "pcm_s16le", "pcm_s24le", "pcm_s32le", "pcm_f32le", "pcm_f64le"),
    *("pcm_alaw", "pcm_mulaw"),
)
CODECS = frozenset({*PCM, "flac", "mp3", "vorbis", "opus"})
DECODERS = CODECS | {"mp3float"}
CONTAINERS = "WAV, FLAC, MP3 or OGG"
LEAST_RATE, MOST_RATE, MOST_CHANNELS = 4000, 192_000, 8  # resampling from less is slow
MOST_PACKETS = 500_000
"""Each packet has some milliseconds; a file with more packets was made to waste CPU time."""

BLOCK_SAMPLES = 2**14  # resampled at a time
STREAMED = 2**32 - 1  # the declared size of a WAV that was written to a pipe

Samples = npt.NDArray[np.float32]


def demuxer(data: bytes) -> str | None:
    """FFmpeg's name of the container, from the first bytes; None: not supported."""
    if data.startswith(b"RIFF") and data[8:12] == b"WAVE":
        return "wav"
    if data.startswith(b"fLaC"):
        return "flac"
    if data.startswith(b"OggS"):
        return "ogg"
    # ID3's tag, or a frame of MPEG audio, layer III
    frame = data[:1] == b"\xff" and len(data) > 1 and data[1] & 0xE6 == 0xE2
    return "mp3" if frame or data.startswith(b"ID3") else None


@contextmanager
def opened(data: bytes) -> Iterator[tuple[Any, Any]]:
    """The container and its first audio stream: see `first_stream`."""
    with first_stream(data, "audio", demuxer(data), CONTAINERS, CODECS, DECODERS) as found:
        context = found[1].codec_context
        rate, channels = context.sample_rate, context.channels
        if not (LEAST_RATE <= rate <= MOST_RATE and 0 < channels <= MOST_CHANNELS):
            raise UnsupportedMedia(
                f"the sound has {channels} channels of {rate} samples a second; supported are up "
                f"to {MOST_CHANNELS} of {LEAST_RATE} to {MOST_RATE}: resample it"
            )
        yield found


def read_seconds(data: bytes, most_seconds: float) -> Fraction:
    """The exact duration, from the packets, without decoding them. Reading stops once it is over
    `most_seconds`. Raises UnsupportedMedia, InvalidMedia."""
    riff = int.from_bytes(data[4:8], "little") if demuxer(data) == "wav" else STREAMED
    if riff != STREAMED and len(data) < LEAST_SHARE * riff:
        raise InvalidMedia(
            f"the file has {len(data)} of the {riff + 8} bytes that its header declares: it is "
            "truncated"
        )
    with opened(data) as (container, stream):
        ticks = skipped = packets = 0
        tick: Fraction = stream.time_base
        sample = Fraction(1, stream.codec_context.sample_rate)
        for packet in container.demux(stream):
            if not packet.size:
                continue
            # Encoders add silence at the start, and in MP3s at the end; decoders skip it.
            for before, after in map(skips, packet.iter_sidedata()):
                skipped += before if not ticks else 0
                skipped += after if container.format.name == "mp3" else 0
            if not ticks and packet.pts is not None:
                skipped = max(skipped, int(-packet.pts * tick / sample))
            ticks += packet.duration or 0
            packets += 1
            if packets > MOST_PACKETS:
                raise InvalidMedia(f"the sound has more than {MOST_PACKETS} packets: save it again")
            if (ticks * tick - skipped * sample) > most_seconds:
                break
        else:
            # The duration of an MP3 is a guess.
            declared = stream.duration if container.format.name != "mp3" else None
            if declared and ticks < LEAST_SHARE * declared:
                raise InvalidMedia(
                    f"the sound ends after {float(ticks * tick):.1f} of the "
                    f"{float(declared * tick):.1f} s that its header declares: it is truncated"
                )
        return max(Fraction(0), ticks * tick - skipped * sample)


def skips(side_data: Any) -> tuple[int, int]:
    """Samples that a decoder drops at the start and at the end of a packet."""
    if "SKIP" not in str(side_data.data_type).upper():
        return 0, 0
    values = np.frombuffer(bytes(side_data)[:8], "<u4")
    return int(values[0]), int(values[1])


def decoded(data: bytes, rate: int, count: int) -> Samples:
    """The sound as `count` mono samples at `rate`. Raises InvalidMedia if the file is corrupt, or
    much shorter than that."""
    parts: list[Samples] = []
    left = count
    with opened(data) as (container, stream):
        resampler = av.AudioResampler("flt", "mono", rate)
        for block in chain(mono_blocks(container, stream), [None]):
            resampled = [part.to_ndarray()[0] for part in resampler.resample(block)]
            parts += resampled
            left -= sum(map(len, resampled))
            if left < 0:  # the plan does not include the rest
                break
    whole = np.concatenate([*parts, np.zeros(0, np.float32)])
    if len(whole) < LEAST_SHARE * count:
        raise InvalidMedia(
            f"the sound ends after {len(whole) / rate:.1f} of the {count / rate:.1f} s that its "
            "header declares: it is truncated"
        )
    return np.pad(whole, (0, max(0, count - len(whole))))[:count]


def mono_blocks(container: Any, stream: Any) -> Iterator[Any]:
    """Mono frames of BLOCK_SAMPLES or a few more. Resampling packet by packet would take longer."""
    # Packed format, because PyAV reads beyond the planes of 8 channels.
    packed, parts = av.AudioResampler("flt"), list[Samples]()
    for frame in container.decode(stream):
        for one in packed.resample(frame):
            channels = one.to_ndarray().reshape(one.samples, -1)
            parts.append(channels.mean(1, dtype=np.float32))
        if sum(map(len, parts)) >= BLOCK_SAMPLES:
            yield frame_of(parts, frame.sample_rate)
            parts = []
    if parts:
        yield frame_of(parts, frame.sample_rate)


def frame_of(parts: Sequence[Samples], rate: int) -> Any:
    frame = av.AudioFrame.from_ndarray(np.concatenate(parts)[None], format="flt", layout="mono")
    frame.sample_rate = rate
    return frame
