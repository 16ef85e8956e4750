"""The calls behind both protocols: authorize, admit, encode, write the response document.

Knows neither Ray, HTTP nor gRPC. The fleet of encoders is a `Backend`; ingress.py has the real one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Protocol

from actors.errors import InvalidOption, ServiceError
from actors.spec.model_spec import ModelSpec
from actors.store.references import Kept
from actors.telemetry.tracing import open_spans
from actors.types import Answer, Dtype, Media
from encoder_service.api.answer import Json, check_size, document, item_document, model_card
from encoder_service.api.auth import Tokens
from encoder_service.api.errors import AtItem
from encoder_service.api.schema import RequestOptions
from encoder_service.config import ServiceOptions
from encoder_service.intake.limits import Buffered, Deadline
from encoder_service.intake.media import Admission
from encoder_service.ops.exchange import Exchange, Observer, ServiceMetrics
from encoder_service.ops.status import Glance, Scrape, SingleFlight, status
from encoder_service.wire.documents import RequestItem

STATUS_SECONDS = 1.0
"""Maximum age of the status: replicas are asked this often, however many clients look."""


class Backend(Protocol):
    """The fleet behind the front door. Raises only the errors of actors/errors.py."""

    def check_room(self) -> None:
        """Raises Overloaded (429) while the router is full, before the body is read.

        `encode` and `stream` raise it too, once the size is known: router/policy/ledger.py.
        """

    async def encode(
        self, media: list[Media], dtype: Dtype, timeout_seconds: float, *, reference: bool
    ) -> list[Answer]:
        """An answer per item, in order: its data as an array, or kept if `reference`."""

    def stream(
        self, media: list[Media], dtype: Dtype, timeout_seconds: float, *, reference: bool
    ) -> AsyncGenerator[tuple[int, Answer]]:
        """Position and answer of each item as soon as it is ready."""

    async def fetch(self, reference: str) -> Kept:
        """What is kept under an id, its data as an array. Raises NotFound."""

    async def release(self, reference: str) -> None:
        """Releases what is kept under an id. Raises NotFound."""

    async def ready_replicas(self) -> int:
        """How many encoders accept work. Raises Unavailable if there is none."""

    async def scrape(self) -> Scrape:
        """The metrics of all replicas that answer in time."""

    async def glance(self) -> Glance:
        """The scrape, the replicas that the router excludes, and every ingress' recent failures."""


class Service:
    """What the HTTP and gRPC handlers call."""

    def __init__(self, options: ServiceOptions, spec: ModelSpec, backend: Backend) -> None:
        self.spec = spec
        self.limits = options.limits
        self.references = options.references
        self.tokens = Tokens(options.auth)
        self.admission = Admission(spec, options.limits, options.fetch)
        self.buffered = Buffered(options.limits.max_buffered_bytes)
        self.backend = backend
        self.metrics = ServiceMetrics()
        access = options.logging.access_log
        self.observer = Observer(self.metrics, open_spans(options.tracing, "ingress"), access)
        self.card = model_card(options, spec)
        self.cache_max_bytes = options.cache.max_bytes
        self.status = SingleFlight(self.look, STATUS_SECONDS)
        self.ready: dict[str, Callable[[], Awaitable[int]]] = {
            "ready_replicas": backend.ready_replicas
        }
        """What /readyz reports; each raises Unavailable if it is not ready."""
        # /metrics needs no token: requests that arrive together share one scrape of the fleet.
        self.scrape = SingleFlight(backend.scrape, 0)

    def authorize(self, authorization: str | None) -> None:
        self.tokens.authorize(authorization)

    async def look(self) -> Json:
        glance = await self.backend.glance()
        return await asyncio.to_thread(status, self.card, self.cache_max_bytes, glance, time.time())

    async def encode(
        self, items: Sequence[RequestItem], options: RequestOptions, exchange: Exchange
    ) -> Json:
        """The response document. Raises ServiceError, or AtItem for the first item that failed."""
        started = time.perf_counter()
        deadline = self._deadline(options)
        admitted = await deadline.keep(self._admit(items, options))
        media = [one for one in admitted if isinstance(one, Media)]
        exchange.admitted(media)
        check_size(media, options, self.spec, self.limits, self.references)
        found: list[Answer] = []
        if media:
            work = self.backend.encode(
                media, options.dtype, deadline.left(), reference=options.reference
            )
            found = await deadline.keep(work)
        answers, documents = iter(found), []
        for index, (item, one) in enumerate(zip(items, admitted, strict=True)):
            answer = next(answers) if isinstance(one, Media) else one
            documents.append(self._item(index, item, one, answer, options, exchange))
        return document(self.spec, documents, found, time.perf_counter() - started)

    async def stream(
        self, items: Sequence[RequestItem], options: RequestOptions, exchange: Exchange
    ) -> AsyncGenerator[Json]:
        """The document of each item as soon as it is ready. Raises as `encode` does.

        The deadline covers the waiting done here, not the time that the consumer takes.
        """
        deadline = self._deadline(options)
        admitted = await deadline.keep(self._admit(items, options))
        positions = [i for i, one in enumerate(admitted) if isinstance(one, Media)]
        media = [one for one in admitted if isinstance(one, Media)]
        exchange.admitted(media)
        if options.reference:
            check_size(media, options, self.spec, self.limits, self.references)
        for index, one in enumerate(admitted):
            if isinstance(one, ServiceError):
                yield self._item(index, items[index], one, one, options, exchange)
        if not media:
            return
        answers = self.backend.stream(
            media, options.dtype, deadline.left(), reference=options.reference
        )
        async with aclosing(answers):  # a client that hangs up ends the work at once
            for _ in media:
                place, answer = await deadline.keep(anext(answers))
                index = positions[place]
                yield self._item(index, items[index], media[place], answer, options, exchange)

    async def fetch(self, reference: str, request_id: str) -> Json:
        """The response document of the item that is kept under an id. Raises NotFound."""
        started = time.perf_counter()
        deadline = Deadline(self.limits.timeout_seconds)
        kept = await deadline.keep(self.backend.fetch(reference))
        media, embedding = kept.media, kept.embedding
        found = item_document(self.spec, 0, media.kind, media, embedding, request_id)
        return document(self.spec, [found], [embedding], time.perf_counter() - started)

    async def release(self, reference: str) -> None:
        deadline = Deadline(self.limits.timeout_seconds)
        await deadline.keep(self.backend.release(reference))

    async def _admit(
        self, items: Sequence[RequestItem], options: RequestOptions
    ) -> list[Media | ServiceError]:
        """Each item's media or error. With on_error `fail` the first error is raised."""
        admitted = await self.admission.admit(items, options.evs_rate)
        if options.on_error == "fail":
            for index, one in enumerate(admitted):
                if isinstance(one, ServiceError):
                    raise AtItem(index, one)
        return admitted

    def _item(
        self,
        index: int,
        item: RequestItem,
        media: Media | ServiceError,
        answer: Answer,
        options: RequestOptions,
        exchange: Exchange,
    ) -> Json:
        """An item's document. With on_error `fail` its error is raised."""
        if isinstance(answer, ServiceError) and options.on_error == "fail":
            raise AtItem(index, answer)
        return item_document(self.spec, index, item.type, media, answer, exchange.request_id)

    def _deadline(self, options: RequestOptions) -> Deadline:
        """The client's own, within the limit. Raises InvalidOption."""
        most = self.limits.timeout_seconds
        seconds = most if options.timeout_s is None else options.timeout_s
        if seconds > most:
            raise InvalidOption(f"options.timeout_s: {seconds:g} is over the limit of {most:g}")
        return Deadline(seconds)
