"""The calls behind both protocols: authorize, admit, encode, write the response document.

Knows nothing of Ray, HTTP or gRPC. The fleet of encoders is a `Backend`, which ingress.py
implements.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Protocol

from actors.engine.budgets import model_capacity
from actors.errors import InvalidOption, ServiceError
from actors.rows.protocol import RowsPlace
from actors.spec.model_spec import ModelSpec
from actors.store.kept import Kept
from actors.telemetry.tracing import open_spans
from actors.types import Answer, Dtype, Embedding, Media
from encoder_service.api.answer import (
    check_size,
    document,
    finite,
    head,
    item_document,
    model_card,
    plan_document,
    timings,
)
from encoder_service.api.auth import Tokens
from encoder_service.api.errors import AtItem
from encoder_service.api.schema import RequestOptions
from encoder_service.config import ServiceOptions
from encoder_service.intake.limits import Buffered, Deadline, Take, offload
from encoder_service.intake.media import Admission
from encoder_service.ops.exchange import Exchange, Observer, ServiceMetrics
from encoder_service.ops.status import Glance, Scrape, SingleFlight, status
from encoder_service.wire.documents import RequestItem
from encoder_service.wire.formats import Document

FETCH_SECONDS = 10.0
"""Time limit for fetching or releasing an id, unless limits.timeout_seconds is lower. The replica
that keeps it may be unreachable."""

STATUS_SECONDS = 1.0
"""Maximum age of the status. Replicas are asked at most this often, however many clients look."""


class Backend(Protocol):
    """The fleet behind the front door. Raises only the errors of actors/errors.py."""

    def check_room(self) -> None:
        """Raises Overloaded (429) while the router is full, before the body is read."""

    async def encode(
        self, media: list[Media], dtype: Dtype, timeout_seconds: float, *, reference: bool
    ) -> list[Answer]:
        """One answer per item, in order. With `reference`, embeddings are kept and have an id;
        otherwise their data is an array."""

    def stream(
        self, media: list[Media], dtype: Dtype, timeout_seconds: float, *, reference: bool
    ) -> AsyncGenerator[tuple[int, Answer]]:
        """Yields the position and answer of each item as soon as it is ready."""

    async def fetch(self, reference: str) -> Kept:
        """What is kept under an id, with its data as an array. Raises NotFound."""

    async def release(self, reference: str) -> None: ...

    async def release_all(self, references: list[str]) -> None:
        """Ignores errors: what is not released expires."""

    async def place(self, reference: str) -> RowsPlace:
        """Where the replica that keeps an id serves its rows. Raises NotFound."""

    def precisions(self) -> Mapping[str, str]:
        """What each encoder runs in: `bf16` or `fp8`."""

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
        self.references = options.references
        budget = model_capacity(options.graphs, spec).tokens[spec.image_path]
        self.admission = Admission(spec, options.limits, options.fetch, options.preprocess, budget)
        self.buffered = Buffered(
            options.limits.max_buffered_bytes, "buffered requests (limits.max_buffered_bytes)"
        )
        self.unsent = Buffered(
            options.limits.max_unsent_bytes,
            "unread responses (limits.max_unsent_bytes)",
        )
        self.backend = backend
        self.metrics = ServiceMetrics()
        self.metrics.unsent_bytes.set_function(lambda: self.unsent.held_bytes)
        spans = open_spans(options.tracing, "ingress")
        self.observer = Observer(self.metrics, spans, options.logging.access_log)
        self.configure(options)
        self.cache_max_bytes = options.cache.max_bytes
        self.status = SingleFlight(self.look, STATUS_SECONDS)
        self.ready: dict[str, Callable[[], Awaitable[int]]] = {
            "ready_replicas": backend.ready_replicas
        }
        """What /readyz reports; each raises Unavailable if it is not ready."""
        # /metrics needs no token, so concurrent requests share one scrape of the fleet.
        self.scrape = SingleFlight(backend.scrape, 0)

    def configure(self, options: ServiceOptions) -> None:
        """Applies the options that can change while the service runs to new requests.

        Raises ConfigError, and then changes nothing.
        """
        self.tokens = Tokens(options.auth)
        self.authorize = self.tokens.authorize
        self.limits = options.limits
        self.fetch_seconds = min(FETCH_SECONDS, options.limits.timeout_seconds)
        self.admission.configure(options.limits, options.fetch)
        self.unsent.most_bytes = options.limits.max_unsent_bytes
        self.observer.configure(access=options.logging.access_log)
        self.card = model_card(options, self.spec)

    def model(self) -> Document:
        """The document of GET /v1/model. With `graphs.precision: auto`, its `precision` is that of
        all encoders, `mixed`, or `auto` while none is ready."""
        if self.card["graphs"]["precision"] != "auto":
            return self.card
        found = set(filter(None, self.backend.precisions().values()))
        precision = "mixed" if len(found) > 1 else next(iter(found), "auto")
        return self.card | {"graphs": self.card["graphs"] | {"precision": precision}}

    async def look(self) -> Document:
        glance = await self.backend.glance()
        return await asyncio.to_thread(status, self.card, self.cache_max_bytes, glance, time.time())

    async def encode(
        self,
        items: Sequence[RequestItem],
        options: RequestOptions,
        exchange: Exchange,
        take: Take,
    ) -> Document:
        """The response document. Raises ServiceError, or AtItem for the first item that failed."""
        started = time.perf_counter()
        deadline, admitted, media = await self._admit(items, options, exchange, take)
        size_bytes = check_size(media, options, self.spec, self.limits, self.references)
        if not options.reference:
            self.unsent.check_room(size_bytes)  # rather than encode what could not be sent
        found: list[Answer] = []
        if media:
            work = self.backend.encode(
                media, options.dtype, deadline.left(), reference=options.reference
            )
            found = await deadline.keep(work)
            if options.encoding == "float" and not options.reference:
                found = await offload(size_bytes, finite, found)
        answers, documents = iter(found), []
        try:
            for index, (item, one) in enumerate(zip(items, admitted, strict=True)):
                answer = next(answers) if isinstance(one, Media) else one
                documents.append(self._item(index, item, one, answer, options, exchange))
        except AtItem:
            await self._release_all(found)  # nobody gets these ids
            raise
        return document(self.spec, documents, found, time.perf_counter() - started)

    async def stream(
        self,
        items: Sequence[RequestItem],
        options: RequestOptions,
        exchange: Exchange,
        take: Take,
    ) -> AsyncGenerator[Document]:
        """Yields each item's document, with its timings, as soon as it is ready.

        The deadline covers the time spent waiting here, not the time that the consumer takes.
        Raises as `encode` does.
        """
        started = time.perf_counter()
        deadline, admitted, media = await self._admit(items, options, exchange, take)
        check_size(media, options, self.spec, self.limits, self.references)
        positions = [i for i, one in enumerate(admitted) if isinstance(one, Media)]
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
                found = self._item(index, items[index], media[place], answer, options, exchange)
                if isinstance(answer, Embedding):
                    found["timings"] = timings([answer], time.perf_counter() - started)
                yield found

    async def plan(
        self,
        items: Sequence[RequestItem],
        options: RequestOptions,
        exchange: Exchange,
        take: Take,
    ) -> Document:
        """What the items would cost, from their headers alone. Asks no replica.

        Raises as `encode` does.
        """
        _, admitted, _ = await self._admit(items, options, exchange, take)
        plans = [
            plan_document(self.spec, index, item.type, one, exchange.request_id)
            for index, (item, one) in enumerate(zip(items, admitted, strict=True))
        ]
        return head(self.spec) | {"items": plans}

    async def fetch(self, reference: str, request_id: str) -> Document:
        """The response document of the item kept under an id. Raises NotFound."""
        started = time.perf_counter()
        deadline = Deadline(self.fetch_seconds, "try again, or encode the item again")
        kept = await deadline.keep(self.backend.fetch(reference))
        media, embedding = kept.media, kept.embedding
        found = item_document(self.spec, 0, media.kind, media, embedding, request_id)
        return document(self.spec, [found], [embedding], time.perf_counter() - started)

    async def release(self, reference: str) -> None:
        deadline = Deadline(self.fetch_seconds, "try again, or let the id expire")
        await deadline.keep(self.backend.release(reference))

    async def _release_all(self, answers: Sequence[Answer]) -> None:
        """Releases the ids among the answers, as far as their replicas can be reached in time."""
        references = [one.reference for one in answers if isinstance(one, Embedding)]
        deadline = Deadline(self.fetch_seconds, "let the ids expire")
        with suppress(ServiceError):
            await deadline.keep(self.backend.release_all(list(filter(None, references))))

    async def place(self, reference: str) -> RowsPlace:
        """Where the replica that keeps an id serves its rows. Raises NotFound."""
        return await self.backend.place(reference)

    async def _admit(
        self,
        items: Sequence[RequestItem],
        options: RequestOptions,
        exchange: Exchange,
        take: Take,
    ) -> tuple[Deadline, list[Media | ServiceError], list[Media]]:
        """Returns the deadline, each item's media or error, and the media alone.

        With on_error `fail`, raises the first error. Raises InvalidOption if the timeout is over
        the limit.
        """
        most = self.limits.timeout_seconds
        seconds = most if options.timeout_s is None else options.timeout_s
        if seconds > most:
            raise InvalidOption(
                f"options.timeout_s is {seconds:g}; limits.timeout_seconds is {most:g}: lower it"
            )
        deadline = Deadline(seconds)
        work = self.admission.admit(items, take, options.evs_rate, options.kwargs())
        admitted = await deadline.keep(work)
        for index, one in enumerate(admitted):
            if isinstance(one, ServiceError) and options.on_error == "fail":
                raise AtItem(index, one)
        media = [one for one in admitted if isinstance(one, Media)]
        exchange.admitted(media)
        return deadline, admitted, media

    def _item(
        self,
        index: int,
        item: RequestItem,
        media: Media | ServiceError,
        answer: Answer,
        options: RequestOptions,
        exchange: Exchange,
    ) -> Document:
        """An item's document. With on_error `fail`, raises its error instead."""
        if isinstance(answer, ServiceError) and options.on_error == "fail":
            raise AtItem(index, answer)
        return item_document(self.spec, index, item.type, media, answer, exchange.request_id)
