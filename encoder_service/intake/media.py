"""Turns the items of a request into Media: fetches URLs, reads headers, checks limits.

Nothing is decoded here. The actor that decodes a file notices if it is truncated.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace

from actors.errors import (
    InvalidMedia,
    InvalidOption,
    InvalidRequest,
    ServiceError,
    TooLarge,
    UnsupportedMedia,
)
from actors.media.animation import is_animation, read_animation
from actors.media.audio_file import read_seconds
from actors.media.video_file import read_clip
from actors.options import PreprocessOptions
from actors.spec.model_spec import ModelSpec
from actors.spec.sizing import MAX_ASPECT
from actors.spec.video import VideoSizing
from actors.types import NO_KWARGS, PLURALS, Alpha, Clip, Kind, Media, ProcessorKwargs, Size
from encoder_service.config import FetchOptions, LimitOptions
from encoder_service.intake.fetch import Fetcher
from encoder_service.intake.header import Header, alpha_notice, is_simple, read_header
from encoder_service.intake.limits import INLINE_BYTES, Take, check_items, offload
from encoder_service.wire.documents import RequestItem
from encoder_service.wire.formats import WireError

SAMPLED = {"fps", "num_frames"}
"""ProcessorKwargs that select the frames of a video file. They exclude each other."""
MOST_ANIMATED_PIXELS = 10**9
"""Maximum pixels of all frames of a GIF or WebP, because each frame is drawn on the one before,
wanted or not."""


class Admission:
    """Decides which items a service accepts, and what they will cost. The router's ledger decides
    whether there is room for them now (429)."""

    def __init__(
        self,
        spec: ModelSpec,
        limits: LimitOptions,
        fetch: FetchOptions,
        preprocess: PreprocessOptions | None = None,
        budget: int | None = None,
    ) -> None:
        """`budget`: tokens of the largest budget; None: of the model's largest image."""
        self.spec = spec
        self.preprocess = preprocess or PreprocessOptions()
        self.budget = budget
        self.configure(limits, fetch)

    def configure(self, limits: LimitOptions, fetch: FetchOptions) -> None:
        """Changes the options for new requests."""
        self.limits = limits
        self.tokens = largest_tokens(self.spec, limits, self.budget)
        self.fetcher = Fetcher(fetch)

    async def admit(
        self,
        items: Sequence[RequestItem],
        take: Take,
        evs_rate: float = 0.0,
        kwargs: ProcessorKwargs = NO_KWARGS,
    ) -> list[Media | ServiceError]:
        """Returns each item's media, or the error for which it is rejected. `evs_rate` applies to
        videos.

        `take` counts the bytes that are fetched, each URL once. An item for which `take` raises
        fails with Overloaded. An item with which the request fetches more than it may send
        (max_body_bytes) fails with TooLarge.
        `kwargs` apply to items that do not set their own and whose kind takes them.
        Raises InvalidRequest, InvalidOption or TooLarge if the request as a whole is rejected.
        """
        if not items:
            raise InvalidRequest("the request has no items: send at least one")
        check_items(len(items), self.limits)
        if kwargs != NO_KWARGS:
            self.spec.check_taken(kwargs, *self.spec.kinds)
        urls = {item.url for item in items if item.url is not None}
        most_bytes, fetched_bytes = self.limits.max_body_bytes, 0

        def take_fetched(size_bytes: int) -> None:
            nonlocal fetched_bytes
            if fetched_bytes + size_bytes > most_bytes:
                raise TooLarge(
                    f"the files of one request are over {most_bytes} bytes together "
                    "(limits.max_body_bytes): send fewer or smaller items, or raise the limit"
                )
            take(size_bytes)
            fetched_bytes += size_bytes

        async with asyncio.TaskGroup() as group:  # if one raises, no other goes on to `take`
            tasks = {url: group.create_task(self._fetch(url, take_fetched)) for url in urls}
        files = [
            item.data or b"" if item.url is None else tasks[item.url].result() for item in items
        ]
        # A PNG of a few KB may have megabytes of metadata to unpack; EXIF blocks may refer to
        # themselves.
        found = [data for data in files if isinstance(data, bytes)]
        simple = all(map(is_simple, found)) and all(item.frames is None for item in items)
        work_bytes = sum(map(len, found)) if simple else INLINE_BYTES + 1
        return await offload(
            work_bytes,
            lambda: [self._probe(*one, evs_rate, kwargs) for one in zip(items, files, strict=True)],
        )

    async def _fetch(self, url: str, take: Take) -> bytes | ServiceError:
        try:
            return await self.fetcher.get(url, take)
        except ServiceError as error:
            return error

    def _probe(
        self,
        item: RequestItem,
        data: bytes | ServiceError,
        evs_rate: float,
        kwargs: ProcessorKwargs,
    ) -> Media | ServiceError:
        if isinstance(data, ServiceError):
            return data
        try:
            asked = self._kwargs(item, kwargs)
            if item.frames is not None:
                media = probe_frames(
                    item.frames, item.fps, self.spec, self.limits, self.preprocess.alpha, asked
                )
            else:
                media = probe(data, item.type, self.spec, self.limits, self.preprocess.alpha, asked)
        except InvalidOption as error:
            if item.own():
                return error
            raise  # the item has no options, so the request's are wrong
        except ServiceError as error:
            return error
        if media.clip:
            return replace(media, evs_rate=evs_rate)
        prune = self.preprocess.prune != "off" and media.kind == "image"
        return replace(media, prune=True) if prune else media

    def _kwargs(self, item: RequestItem, wide: ProcessorKwargs) -> ProcessorKwargs:
        """The options of an item: its own, then those of its request. Raises InvalidOption."""
        if wide == NO_KWARGS and not item.own():
            return NO_KWARGS
        try:
            given, taken = item.kwargs(), self.spec.defaults(item.type)
        except WireError as error:
            raise InvalidOption(str(error)) from None
        sampled = item.frames is None and not SAMPLED & given.keys()
        for name, value in wide.given().items():
            if name in taken and (sampled or name not in SAMPLED):
                given.setdefault(name, value)
        largest = self.spec.largest(item.type, self.tokens)
        for name, value in given.items():
            if name in largest and value > largest[name]:
                raise InvalidOption(self._over(name, value, largest[name]))
        return ProcessorKwargs(**given)

    def _over(self, name: str, value: float, most: float) -> str:
        if name in SAMPLED:
            return f"{name}: {value:g} is over the {most:g} of {self.spec.id}: lower it"
        limited = self.limits.max_image_tokens == self.tokens
        key = "limits.max_image_tokens" if limited else "the largest of graphs.token_budgets"
        return f"{name}: {value} is over {most}, which gives {self.tokens} tokens ({key}): lower it"


def largest_tokens(spec: ModelSpec, limits: LimitOptions, budget: int | None = None) -> int:
    """Tokens of the largest image that a request may ask for."""
    most = budget or spec.sizing.token_range()[1]
    return min(most, limits.max_image_tokens or most)


def probe(
    data: bytes,
    kind: Kind,
    spec: ModelSpec,
    limits: LimitOptions,
    alpha: Alpha = "white",
    kwargs: ProcessorKwargs = NO_KWARGS,
) -> Media:
    """What a file is and what it will cost, from its header. The digest takes 1 ms per 2 MB.

    Raises InvalidMedia (damaged), UnsupportedMedia (format or kind), TooLarge (limits),
    InvalidOption (kwargs that the model does not take; Admission checks that none is too large).
    """
    check_kind(spec, kind)
    if kind == "audio":
        return probe_sound(data, spec, limits)
    if kind == "video":
        if is_animation(data):
            return probe_animation(data, spec, limits, alpha, kwargs)
        clip = read_clip(data, limits.max_video_frames)
        return video_media(spec, limits, clip, data, (), kwargs)
    header = read_header(data)
    check_size(header.size, limits.max_pixels)
    digest = hashlib.sha256(data).hexdigest()
    notice, alpha = transparency([header], alpha)
    asked = spec.asked(kind, kwargs)
    plan, most = asked.sizing.plan(header.size), limits.max_image_tokens
    if most and plan.tokens > most:
        raise TooLarge(
            f"the image would be {plan.tokens} tokens, over {most} (limits.max_image_tokens): "
            "scale it down, or lower its max_pixels or max_patches"
        )
    kwargs = kwargs if asked.sizing != spec.sizing else NO_KWARGS
    return Media(kind, data, plan, digest, notice, size=header.size, alpha=alpha, kwargs=kwargs)


def probe_animation(
    data: bytes, spec: ModelSpec, limits: LimitOptions, alpha: Alpha, kwargs: ProcessorKwargs
) -> Media:
    """An animated GIF or WebP as a video."""
    header, found = read_header(data), read_animation(data, limits.max_video_frames)
    frames, size = len(found.durations_ms), header.size
    if frames * size.width * size.height > MOST_ANIMATED_PIXELS:
        raise TooLarge(
            f"the animation has {frames} frames of {size.width} x {size.height}, over "
            f"{MOST_ANIMATED_PIXELS} pixels together: send a video file"
        )
    header = replace(header, notice="", transparent=found.transparent)
    notice, alpha = transparency([header], alpha)
    media = video_media(spec, limits, found.clip(header.size), data, (), kwargs)
    return replace(media, notice=notice, alpha=alpha)


def transparency(headers: Sequence[Header], alpha: Alpha) -> tuple[str, Alpha]:
    """The notice for an item made of these files, and how its transparency is handled."""
    notices = [header.notice for header in headers if header.notice]
    transparent = any(header.transparent for header in headers)
    notices += [alpha_notice(alpha)] if transparent else []
    return "; ".join(dict.fromkeys(notices)), alpha if transparent else "drop"


def probe_frames(
    frames: Sequence[bytes],
    fps: float | None,
    spec: ModelSpec,
    limits: LimitOptions,
    alpha: Alpha = "white",
    kwargs: ProcessorKwargs = NO_KWARGS,
) -> Media:
    """A video given as a list of image files. `fps` defaults to the model's own sampling rate."""
    video = check_videos(spec)
    if not frames:
        raise InvalidMedia(f"the video has no frames: send at least {video.least}")
    if len(frames) > video.sampling.most:
        raise TooLarge(f"{len(frames)} frames; {spec.id} takes {video.sampling.most}: send fewer")
    headers: list[Header] = []
    for place, frame in enumerate(frames):
        try:
            headers.append(read_header(frame))
        except (InvalidMedia, UnsupportedMedia) as error:
            raise type(error)(f"frames[{place}]: {error}") from None
        size, first = headers[-1].size, headers[0].size
        if size != first:
            raise InvalidMedia(
                f"frames[{place}] has {size.width} x {size.height} pixels, the first has "
                f"{first.width} x {first.height}: scale all frames to one size"
            )
    clip = Clip(headers[0].size, len(frames), fps or video.sampling.fps, chosen=True)
    notice, alpha = transparency(headers, alpha)
    media = video_media(spec, limits, clip, b"", tuple(frames), kwargs)
    return replace(media, notice=notice, alpha=alpha)


def video_media(
    spec: ModelSpec,
    limits: LimitOptions,
    clip: Clip,
    data: bytes,
    frames: tuple[bytes, ...],
    kwargs: ProcessorKwargs,
) -> Media:
    check_size(clip.size, limits.max_pixels)
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
    video = check_videos(spec.asked("video", kwargs))
    plan = video.plan(clip)
    if plan.tokens > limits.max_video_tokens:
        raise TooLarge(
            f"the video would be {plan.tokens} tokens in {plan.frames} groups of frames, over "
            f"{limits.max_video_tokens} (limits.max_video_tokens): cut it, scale it down, or ask "
            "for fewer frames or pixels"
        )
    decoded = video.indices(clip)[-1] + 1
    pixels = decoded * clip.size.width * clip.size.height
    if pixels > limits.max_video_pixels:
        raise TooLarge(
            f"the video has {decoded} frames of {clip.size.width} x {clip.size.height} up to the "
            f"last that is encoded, {pixels} pixels together, over the limit of "
            f"{limits.max_video_pixels} (limits.max_video_pixels): cut it, or scale it down"
        )
    digest = hashlib.sha256(data)
    for frame in frames:
        digest.update(hashlib.sha256(frame).digest())
    return Media(
        "video",
        data,
        plan,
        digest.hexdigest(),
        clip=clip,
        frames=frames,
        size=clip.size,
        kwargs=kwargs if video != spec.video else NO_KWARGS,
    )


def probe_sound(data: bytes, spec: ModelSpec, limits: LimitOptions) -> Media:
    """Rejects sounds that are too long, which transformers' processors would cut to a model's
    single window."""
    assert spec.audio
    most = longest_seconds(spec, limits)
    seconds = read_seconds(data, most)
    if seconds > most:
        limit = " (limits.max_audio_seconds)" if most == limits.max_audio_seconds else ""
        raise TooLarge(
            f"the sound is longer than {most:g} s, the most that {spec.id} takes{limit}: cut it"
        )
    size = Size(math.ceil(seconds * spec.audio.rate), 1)
    plan = spec.audio.plan(size)
    if not plan.tokens:
        raise InvalidMedia(
            f"the sound lasts {float(seconds):g} s, too short for one token: send a longer one"
        )
    return Media("audio", data, plan, hashlib.sha256(data).hexdigest(), size=size)


def longest_seconds(spec: ModelSpec, limits: LimitOptions) -> float:
    """The maximum length of one sound."""
    assert spec.audio
    return min(limits.max_audio_seconds, spec.audio.most_seconds)


def check_kind(spec: ModelSpec, kind: Kind) -> None:
    """Raises UnsupportedMedia for a kind that the model does not take."""
    if kind in spec.kinds:
        return
    one = {"image": "an image", "video": "a video", "audio": "a sound"}[kind]
    advice = ": send its frames as images" if kind == "video" and "image" in spec.kinds else ""
    taken = " and ".join(PLURALS[each] for each in spec.kinds)
    raise UnsupportedMedia(
        f"the model {spec.id} ({spec.family}) takes {taken} only, not {one}{advice}"
    )


def check_videos(spec: ModelSpec) -> VideoSizing:
    check_kind(spec, "video")
    assert spec.video
    return spec.video


def check_size(size: Size, max_pixels: int) -> None:
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
