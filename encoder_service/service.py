"""The calls of the API, once for both protocols: authorize, admit, encode, shape the answer.

Knows nothing of Ray, HTTP or gRPC: the fleet is a `Backend`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Protocol

from actors.errors import InvalidOption, ServiceError
from actors.spec.model_spec import ModelSpec
from actors.store.references import Kept
from actors.telemetry.tracing import open_spans
from actors.types import Answer, Dtype, Media
from encoder_service.api.answer import Entry, Json, document
from encoder_service.api.auth import Tokens
from encoder_service.api.buffered import Buffered
from encoder_service.api.deadline import Deadline
from encoder_service.api.errors import AtItem
from encoder_service.api.exchange import Exchange, Observer
from encoder_service.api.schema import RequestOptions
from encoder_service.config import ServiceOptions
from encoder_service.intake.admission import Admission, check_answer
from encoder_service.ops.metrics import Scrape, ServiceMetrics
from encoder_service.ops.model_card import card
from encoder_service.ops.singleflight import Fresh
from encoder_service.ops.status import Glance, status
from encoder_service.wire.documents import RequestItem

STATUS_SECONDS = 1.0
"""How old the status may be: however many look, the replicas are asked so often."""


class Backend(Protocol):
    """The fleet behind the front door. Raises only errors of this service."""

    def check_room(self) -> None:
        """Raises Overloaded while whatever is sent would be refused, before it is read."""

    async def encode(
        self, media: list[Media], dtype: Dtype, timeout_seconds: float, *, reference: bool
    ) -> list[Answer]:
        """An answer for each item, in order: its data as an array, or with `reference` kept."""

    def stream(
        self, media: list[Media], dtype: Dtype, timeout_seconds: float, *, reference: bool
    ) -> AsyncGenerator[tuple[int, Answer]]:
        """Position and answer, as they come."""

    async def fetch(self, reference: str) -> Kept:
        """What is kept under an id, its data as an array. Raises NotFound."""

    async def release(self, reference: str) -> None:
        """Lets go of it before its time. Raises NotFound."""

    async def ready_replicas(self) -> int:
        """Encoders that may be given work. Raises Unavailable if there is none."""

    async def scrape(self) -> Scrape:
        """The metrics of all replicas, as far as they answer in time."""

    async def glance(self) -> Glance:
        """The same with what the router knows, and everybody's last failures."""


class Service:
    """One front door: what HTTP and gRPC call."""

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
        self.card = card(options, spec)
        self.cache_max_bytes = options.cache.max_bytes
        self.status = Fresh(self.look, STATUS_SECONDS)
        # Anybody may ask for it: those that come together wait for one scrape of the fleet.
        self.scrape = Fresh(backend.scrape, 0)

    def authorize(self, authorization: str | None) -> None:
        """Takes the value of the header. Raises Unauthorized."""
        self.tokens.authorize(authorization)

    async def look(self) -> Json:
        """The document of GET /v1/status, as of now."""
        glance = await self.backend.glance()
        return await asyncio.to_thread(status, self.card, self.cache_max_bytes, glance, time.time())

    async def encode(
        self, items: Sequence[RequestItem], options: RequestOptions, exchange: Exchange
    ) -> Json:
        """The response document. Raises ServiceError, or AtItem for the first item that failed."""
        started = time.perf_counter()
        deadline = self.deadline(options)
        admitted = await deadline.keep(self.admit(items, options))
        media = [one for one in admitted if isinstance(one, Media)]
        exchange.admitted(media)
        check_answer(media, options, self.spec, self.limits, self.references)
        found: list[Answer] = []
        if media:
            work = self.backend.encode(
                media, options.dtype, deadline.left(), reference=options.reference
            )
            found = await deadline.keep(work)
        answers, entries = iter(found), []
        for index, (item, one) in enumerate(zip(items, admitted, strict=True)):
            entries.append(entry(index, item, one, answers, options))
        return document(self.spec, entries, time.perf_counter() - started, exchange.request_id)

    async def stream(
        self, items: Sequence[RequestItem], options: RequestOptions, exchange: Exchange
    ) -> AsyncGenerator[Entry]:
        """Each item as soon as it is ready. Raises as `encode` does.

        The deadline is around what is waited for here, never around what the consumer does.
        """
        deadline = self.deadline(options)
        admitted = await deadline.keep(self.admit(items, options))
        positions = [i for i, one in enumerate(admitted) if isinstance(one, Media)]
        media = [one for one in admitted if isinstance(one, Media)]
        exchange.admitted(media)
        if options.reference:
            check_answer(media, options, self.spec, self.limits, self.references)
        for index, one in enumerate(admitted):
            if not isinstance(one, Media):
                yield entry(index, items[index], one, iter(()), options)
        if not media:
            return
        answers = self.backend.stream(
            media, options.dtype, deadline.left(), reference=options.reference
        )
        async with aclosing(answers):  # a client that goes away ends the work at once
            for _ in media:
                place, answer = await deadline.keep(anext(answers))
                index = positions[place]
                yield entry(index, items[index], media[place], iter([answer]), options)

    async def fetch(self, reference: str, request_id: str) -> Json:
        """The response document of the one item that is kept under an id. Raises NotFound."""
        started = time.perf_counter()
        deadline = Deadline(self.limits.timeout_seconds)
        kept = await deadline.keep(self.backend.fetch(reference))
        found = Entry(0, kept.media.kind, kept.media, kept.embedding)
        return document(self.spec, [found], time.perf_counter() - started, request_id)

    async def release(self, reference: str) -> None:
        """Lets go of what is kept under an id. Raises NotFound."""
        deadline = Deadline(self.limits.timeout_seconds)
        await deadline.keep(self.backend.release(reference))

    async def admit(
        self, items: Sequence[RequestItem], options: RequestOptions
    ) -> list[Media | ServiceError]:
        """Each item's media, or its error. With on_error `fail` the first error is raised."""
        admitted = await self.admission.admit(items, options.evs_rate)
        if options.on_error == "fail":
            for index, one in enumerate(admitted):
                if isinstance(one, ServiceError):
                    raise AtItem(index, one)
        return admitted

    def deadline(self, options: RequestOptions) -> Deadline:
        """The caller's. Raises InvalidOption."""
        most = self.limits.timeout_seconds
        seconds = most if options.timeout_s is None else options.timeout_s
        if seconds > most:
            raise InvalidOption(f"options.timeout_s: {seconds:g} is over the limit of {most:g}")
        return Deadline(seconds)


def entry(
    index: int,
    item: RequestItem,
    admitted: Media | ServiceError,
    answers: Iterator[Answer],
    options: RequestOptions,
) -> Entry:
    """An admitted item takes the next answer. With on_error `fail` an error is raised."""
    media = admitted if isinstance(admitted, Media) else None
    answer = next(answers) if isinstance(admitted, Media) else admitted
    if isinstance(answer, ServiceError) and options.on_error == "fail":
        raise AtItem(index, answer)
    return Entry(index, item.type, media, answer)
