"""What the language model gets for a chat's images and videos: embeddings from the encoders, or,
with `llm.local_encoder`, patches, which our engine encodes inside vLLM's process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextvars import Context
from dataclasses import dataclass
from time import monotonic
from typing import ClassVar

import numpy as np
import torch
from ray.exceptions import RayTaskError
from ray.serve.handle import DeploymentHandle
from torch import Tensor

from actors.errors import EmbeddingLost, Overloaded, ServiceError, TooLarge, Unavailable
from actors.media.decoder import Decoder
from actors.telemetry.tracing import Origin
from actors.types import Answer, Dtype, Embedding, Item, Media
from encoder_service.api.errors import AtItem
from encoder_service.intake.limits import Deadline, offload
from router.here import Reader, encode_here
from router.replicas.pinned import by_reference
from router.replicas.serve_fleet import LOST, brief

log = logging.getLogger("ray.serve")

BY_VALUE_SECONDS = 60.0
"""How long rows are taken by value after ids have failed, so that items are not encoded twice all
the time. The connector avoids an encoder that it cannot reach for as long."""


@dataclass(frozen=True, slots=True)
class Patches:
    """An image or a video that is not encoded yet, cut as engines/vllm_patches.py says."""

    data: Tensor
    reference: ClassVar[str] = ""  # as of an Embedding with its rows


Input = Embedding | Patches
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


class LocalEmbedder(Embedder):
    """For a language model in whose process images are encoded. Asks no router."""

    def __init__(self, router: DeploymentHandle, dtype: Dtype, decoder: Decoder) -> None:
        super().__init__(router, dtype)
        self.decoder = decoder

    async def encode(
        self, media: Sequence[Media], deadline: Deadline, origin: Origin, *, keep: bool = False
    ) -> Sequence[Input]:
        """Returns patches. Raises as Embedder.encode does, as soon as an item has failed."""
        if not media:
            return []
        tasks = [asyncio.ensure_future(self._decoded(one)) for one in media]
        try:
            await deadline.keep(asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION))
            errors = [task.exception() if task.done() else None for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
        for index, error in enumerate(errors):
            if isinstance(error, ServiceError) and not isinstance(error, Unavailable):
                raise AtItem(index, error)
            if error:
                raise error
        return [task.result() for task in tasks]

    async def _decoded(self, media: Media) -> Patches:
        item = await asyncio.wrap_future(self.decoder.submit(media))
        return await offload(item.patches.nbytes, copied, item)


def copied(item: Item) -> Patches:
    """Copies patches out of the memory of decoding processes, which has no room for all chats."""
    frames = [item.patches] if item.later is None else [item.patches, item.later]
    return Patches(torch.from_numpy(np.stack(frames)))
