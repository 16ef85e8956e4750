"""From what a request says to what may be encoded: limits, URLs, image headers. Never decodes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from actors.errors import InvalidRequest, ServiceError, TooLarge
from actors.options import ReferenceOptions
from actors.spec.evs import retained_tokens
from actors.spec.model_spec import ModelSpec
from actors.types import Media
from encoder_service.api.schema import RequestOptions
from encoder_service.config import FetchOptions, LimitOptions
from encoder_service.intake.fetch import Fetcher
from encoder_service.intake.header import is_simple
from encoder_service.intake.media import probe, probe_frames
from encoder_service.ops.offload import offload
from encoder_service.wire.documents import RequestItem
from encoder_service.wire.tensors import WIDTHS

MOST_FLOAT_BYTES = 16 * 2**20
"""Of tensors as lists of numbers: some ten characters and half a microsecond a value."""


MUCH = 2**62
"""Bytes: it is not known how many, but not few."""


class Admission:
    """What one service lets in."""

    def __init__(self, spec: ModelSpec, limits: LimitOptions, fetch: FetchOptions) -> None:
        self.spec = spec
        self.limits = limits
        self.fetcher = Fetcher(fetch)

    async def admit(
        self, items: Sequence[RequestItem], evs_rate: float = 0.0
    ) -> list[Media | ServiceError]:
        """Each item's media, or why it is refused. `evs_rate`: of the videos.

        Raises InvalidRequest or TooLarge where the request as a whole is.
        """
        if not items:
            raise InvalidRequest("the request has no items: send at least one image")
        if len(items) > self.limits.max_items:
            raise TooLarge(
                f"{len(items)} items in one request; limits.max_items is {self.limits.max_items}: "
                "send several requests"
            )
        found = await self.files(items)
        admitted = await offload(work_bytes(items, found), self.probe_all, items, found)
        return [
            replace(one, evs_rate=evs_rate) if isinstance(one, Media) and one.clip else one
            for one in admitted
        ]

    async def files(self, items: Sequence[RequestItem]) -> Sequence[bytes | ServiceError]:
        """The bytes of each."""
        here = [item.data for item in items if item.data is not None]
        if len(here) == len(items):
            return here
        return await asyncio.gather(*(self.data(item) for item in items))

    async def data(self, item: RequestItem) -> bytes | ServiceError:
        """The item's bytes, fetched if it is a URL; none of a list of frames."""
        if item.data is not None or item.frames is not None:
            return item.data or b""
        try:
            if item.url is None:
                raise InvalidRequest("the item has neither data nor url: give one of them")
            return await self.fetcher.get(item.url)
        except ServiceError as error:
            return error

    def probe_all(
        self, items: Sequence[RequestItem], found: Sequence[bytes | ServiceError]
    ) -> list[Media | ServiceError]:
        """Headers and digests: CPU work."""
        return [
            data if isinstance(data, ServiceError) else self.probe(item, data)
            for item, data in zip(items, found, strict=True)
        ]

    def probe(self, item: RequestItem, data: bytes) -> Media | ServiceError:
        """One item's media, or why it is refused."""
        try:
            if item.frames is not None:
                return probe_frames(item.frames, item.fps, self.spec, self.limits)
            return probe(data, item.type, self.spec, self.limits)
        except ServiceError as error:
            return error


def work_bytes(items: Sequence[RequestItem], found: Sequence[bytes | ServiceError]) -> int:
    """How much there is to hash and to read, as `offload` counts it.

    A PNG of a few KB may have MB of metadata to unpack; EXIF blocks may refer to themselves.
    """
    files = [data for data in found if isinstance(data, bytes)]
    simple = all(map(is_simple, files)) and all(item.frames is None for item in items)
    return sum(map(len, files)) if simple else MUCH


def check_answer(
    media: Sequence[Media],
    options: RequestOptions,
    spec: ModelSpec,
    limits: LimitOptions,
    references: ReferenceOptions,
) -> None:
    """Raises TooLarge where the tensors of one answer would be too many bytes, here or kept."""
    most, name = limits.max_response_bytes, "limits.max_response_bytes"
    advice = "send fewer items at a time, or take EncodeStream over gRPC"
    if options.encoding == "float" and most > MOST_FLOAT_BYTES:
        most, name = MOST_FLOAT_BYTES, "the most for lists of numbers"
        advice = "send fewer items at a time, or leave options.encoding out"
    if options.reference:
        most, name = references.max_bytes, "references.max_bytes"
        advice = "send fewer items at a time: the first would make room for the last"
    tokens = sum(retained_tokens(one.plan, one.evs_rate) for one in media)
    size_bytes = tokens * spec.width * WIDTHS[options.dtype]
    if size_bytes > most:
        raise TooLarge(f"the answer would be {size_bytes} bytes, over {most} ({name}): {advice}")
