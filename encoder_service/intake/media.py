"""From the bytes of one item to Media: what it is and what it will cost, from its header alone.

Nothing is decoded here. A file that is whole at its head and truncated later is found by the actor
that decodes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from actors.errors import InvalidMedia, TooLarge, UnsupportedMedia
from actors.media.video_file import read_clip
from actors.spec.model_spec import ModelSpec
from actors.spec.sizing import MAX_ASPECT
from actors.spec.video import VideoSizing
from actors.types import Clip, Kind, Media, Size
from encoder_service.config import LimitOptions
from encoder_service.intake.header import read_header


def probe(data: bytes, kind: Kind, spec: ModelSpec, limits: LimitOptions) -> Media:
    """Raises InvalidMedia (not one), UnsupportedMedia (format or kind), TooLarge (limits).

    Takes about a millisecond for each 2 MB of `data`: the digest reads all of it.
    """
    if kind == "video":
        check_videos(spec)
        return video_media(spec, limits, read_clip(data, limits.max_video_frames), data, ())
    header = read_header(data)
    check_size(header.size, limits.max_pixels)
    digest = hashlib.sha256(data).hexdigest()
    return Media(kind, data, spec.sizing.plan(header.size), digest, header.notice)


def probe_frames(
    frames: Sequence[bytes], fps: float | None, spec: ModelSpec, limits: LimitOptions
) -> Media:
    """A video that comes as a list of image files, all of which are encoded. Raises as `probe`.

    Without `fps` they are taken to be as many a second as the model's own sampling takes.
    """
    video = check_videos(spec)
    if not frames:
        raise InvalidMedia(f"the video has no frames: send at least {video.least}")
    if len(frames) > video.sampling.most:
        raise TooLarge(f"{len(frames)} frames; {spec.id} takes {video.sampling.most}: send fewer")
    sizes = []
    for place, frame in enumerate(frames):
        try:
            sizes.append(read_header(frame).size)
        except (InvalidMedia, UnsupportedMedia) as error:
            raise type(error)(f"frames[{place}]: {error}") from None
        if sizes[-1] != sizes[0]:
            raise InvalidMedia(
                f"frames[{place}] is of {sizes[-1].width} x {sizes[-1].height} pixels, not of the "
                f"{sizes[0].width} x {sizes[0].height} of the first: scale them alike"
            )
    clip = Clip(sizes[0], len(frames), fps or video.sampling.fps, chosen=True)
    return video_media(spec, limits, clip, b"", tuple(frames))


def video_media(
    spec: ModelSpec, limits: LimitOptions, clip: Clip, data: bytes, frames: tuple[bytes, ...]
) -> Media:
    """What a video will cost. Raises TooLarge where that is too much."""
    check_size(clip.size, limits.max_pixels)
    check_length(clip, limits)
    plan = check_videos(spec).plan(clip)
    if plan.tokens > limits.max_video_tokens:
        raise TooLarge(
            f"the video would be {plan.tokens} tokens in {plan.frames} groups of frames, over "
            f"{limits.max_video_tokens} (limits.max_video_tokens): cut it, or scale it down"
        )
    digest = hashlib.sha256(data)
    for frame in frames:
        digest.update(hashlib.sha256(frame).digest())
    return Media("video", data, plan, digest.hexdigest(), clip=clip, frames=frames)


def check_videos(spec: ModelSpec) -> VideoSizing:
    """How the model cuts videos up. Raises UnsupportedMedia if it takes none."""
    if spec.video is None:
        raise UnsupportedMedia(
            f"the model {spec.id} ({spec.family}) takes images only, not a video: "
            "send its frames as images"
        )
    return spec.video


def check_length(clip: Clip, limits: LimitOptions) -> None:
    """Raises TooLarge for a video that takes too long to decode."""
    if clip.frames > limits.max_video_frames:
        raise TooLarge(
            f"the video has {clip.frames} frames or more, over the limit of "
            f"{limits.max_video_frames} (limits.max_video_frames): cut it, or lower its rate"
        )
    seconds = clip.frames / clip.fps
    if seconds > limits.max_video_seconds:
        raise TooLarge(
            f"the video lasts {seconds:.0f} s, over the limit of {limits.max_video_seconds:g} s "
            "(limits.max_video_seconds): cut it"
        )


def check_size(size: Size, max_pixels: int) -> None:
    """Raises TooLarge for what no model should be given."""
    width, height = size.width, size.height
    if width * height > max_pixels:
        raise TooLarge(
            f"the image declares {width} x {height} pixels, over the limit of {max_pixels} "
            "(limits.max_pixels): scale it down"
        )
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise TooLarge(
            f"an image of {width} x {height} pixels has an aspect ratio over {MAX_ASPECT}: crop it"
        )
