"""What the language model gets for a chat's images and videos: embeddings from the encoders, or,
with `llm.local_encoder`, pixels, which our engine encodes inside vLLM's process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from dataclasses import dataclass
from time import monotonic
from typing import ClassVar

from ray.exceptions import RayTaskError
from ray.serve.handle import DeploymentHandle
from torch import Tensor

from actors.errors import EmbeddingLost, Overloaded, ServiceError, TooLarge
from actors.media.image import check_grid, decode
from actors.media.patchify import resize, size_of
from actors.spec.model_spec import ModelSpec
from actors.telemetry.tracing import Origin
from actors.types import Answer, Dtype, Embedding, Media
from encoder_service.api.errors import AtItem
from encoder_service.engines.vllm_patches import block_sizing, kept_whole
from encoder_service.intake.limits import Deadline
from router.here import Reader, encode_here
from router.replicas.pinned import by_reference
from router.replicas.serve_fleet import LOST, brief

log = logging.getLogger("ray.serve")

BY_VALUE_SECONDS = 60.0
"""How long rows are taken by value after ids have failed, so that items are not encoded twice all
the time. The connector avoids an encoder that it cannot reach for as long."""

DECODING_THREADS = 4
"""Of a replica. Each takes up to 16 bytes per pixel, and the GIL, which vLLM's front end needs."""


@dataclass(frozen=True, slots=True)
class Pixels:
    """An image that is not encoded yet: resized, as vllm_patches.py keeps it whole."""

    data: Tensor
    reference: ClassVar[str] = ""  # as of an Embedding with its rows


Input = Embedding | Pixels
"""What the language model gets for an image or a video."""


class Embedder:
    """Gets embeddings from the Router deployment, in the language model's dtype."""

    def __init__(
        self, router: DeploymentHandle, dtype: Dtype, reader: Reader | None = None
    ) -> None:
        """`reader` reads rows from the encoders' devices, if the encoders leave them there."""
        self.reader = reader
        self.router = by_reference(router, "encode")
        self.releases = router.options(method_name="release_all")
        self.releasing: set[asyncio.Task[None]] = set()
        self.by_value_until = 0.0
        self.dtype: Dtype = dtype

    async def encode(
        self, media: Sequence[Media], deadline: Deadline, origin: Origin, *, keep: bool = False
    ) -> Sequence[Input]:
        """Returns embeddings in the order of `media`, with their data in this process.

        With `keep`, they have ids instead, which `release` ends, except those that encoders cannot
        keep, and all while ids fail. Raises AtItem for the first item that failed, ServiceError for
        the request as a whole.
        """
        if not media:
            return []
        keep = keep and monotonic() >= self.by_value_until
        answers = await self._answers(media, deadline, origin, keep)
        if keep:
            try:
                answers = await self._by_value(media, answers, deadline, origin)
            except BaseException:
                self.release([one for one in answers if isinstance(one, Embedding)])
                raise
        found = [answer for answer in answers if isinstance(answer, Embedding)]
        if len(found) < len(media):
            self.release(found)
        for index, answer in enumerate(answers):
            if isinstance(answer, EmbeddingLost):
                raise answer  # not the item's fault
            if isinstance(answer, ServiceError):
                raise AtItem(index, answer)
        return found

    async def _answers(
        self, media: Sequence[Media], deadline: Deadline, origin: Origin, keep: bool
    ) -> list[Answer]:
        made: list[Embedding] = []

        async def call(media: list[Media], dtype: Dtype, timeout_seconds: float) -> list[Answer]:
            answers = await self._call(origin, keep, media, dtype, timeout_seconds)
            made.extend(one for one in answers if isinstance(one, Embedding))
            return answers

        try:
            work = encode_here(call, media, self.dtype, deadline.left(), self.reader)
            return await deadline.keep(work)
        except BaseException:
            self.release(made)  # of earlier attempts
            raise

    async def _by_value(
        self,
        media: Sequence[Media],
        answers: Sequence[Answer],
        deadline: Deadline,
        origin: Origin,
    ) -> list[Answer]:
        """The answers, with the rows of items that the encoders may not have been able to keep."""
        again = [
            place for place, one in enumerate(answers) if isinstance(one, Overloaded | TooLarge)
        ]
        if not again:
            return list(answers)
        found = await self._answers([media[place] for place in again], deadline, origin, False)
        by_place = dict(zip(again, found, strict=True))
        now_there = (place for place, one in by_place.items() if isinstance(one, Embedding))
        if any(isinstance(answers[place], Overloaded) for place in now_there):
            self.ids_failed("an encoder has no room (references.max_bytes)")
        return [by_place.get(place, one) for place, one in enumerate(answers)]

    def ids_failed(self, why: str) -> None:
        log.warning("rows are taken by value for %g s: %s", BY_VALUE_SECONDS, why)
        self.by_value_until = monotonic() + BY_VALUE_SECONDS

    def release(self, embeddings: Sequence[Input]) -> None:
        """Lets the encoders forget kept rows. Does not wait for it."""
        references = [one.reference for one in embeddings if one.reference]
        if references:
            # In an empty context, because Serve ends the calls of a request with the request.
            loop = asyncio.get_running_loop()
            work = loop.create_task(self._release(references), context=Context())
            self.releasing.add(work)
            work.add_done_callback(self.releasing.discard)

    async def _release(self, references: list[str]) -> None:
        try:
            await self.releases.remote(references)
        except Exception as error:  # of Serve or Ray
            log.debug("embeddings were not released, and will expire: %s", error)

    async def _call(
        self, origin: Origin, keep: bool, media: list[Media], dtype: Dtype, timeout_seconds: float
    ) -> list[Answer]:
        """One attempt. encode_here retries items that are lost with their router."""
        try:
            answers: list[Answer] = await self.router.remote(
                media, dtype, timeout_seconds, origin=origin, keep=keep
            )
        except LOST as error:
            lost = f"the router was lost ({brief(error)}): send the request again"
            return [EmbeddingLost(lost)] * len(media)
        except RayTaskError as error:
            if isinstance(error.cause, ServiceError):
                raise error.cause from None
            raise
        return answers


def pixels(media: Media, spec: ModelSpec) -> Pixels:
    """Raises InvalidMedia, TooLarge."""
    spec = spec.asked("image", media.kwargs)
    sizing, image = block_sizing(spec), decode(media.data, media.alpha)
    check_grid(media, sizing.plan(size_of(image)))
    resized = resize(image, sizing.resized(size_of(image)), spec.resample)
    (whole,) = kept_whole(resized[None], sizing.patch_size)
    return Pixels(whole)


class LocalEmbedder(Embedder):
    """For a language model whose images are encoded inside vLLM's process."""

    def __init__(self, router: DeploymentHandle, dtype: Dtype, spec: ModelSpec) -> None:
        super().__init__(router, dtype)
        self.spec = spec
        self.threads = ThreadPoolExecutor(DECODING_THREADS, "decode")

    async def encode(
        self, media: Sequence[Media], deadline: Deadline, origin: Origin, *, keep: bool = False
    ) -> Sequence[Input]:
        """Returns the pixels of images, and the embeddings of videos, which are never kept. Raises
        as Embedder.encode does."""
        work = (self._one(place, one, deadline, origin) for place, one in enumerate(media))
        return await deadline.keep(asyncio.gather(*work))

    async def _one(self, place: int, media: Media, deadline: Deadline, origin: Origin) -> Input:
        if media.clip:
            try:
                (rows,) = await super().encode([media], deadline, origin)
            except AtItem as error:
                raise AtItem(place, error.error) from None
            return rows
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self.threads, pixels, media, self.spec)
        except ServiceError as error:
            raise AtItem(place, error) from None
