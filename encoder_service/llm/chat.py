"""The language model's Serve deployment: tokenises while the encoders work, then generates.

Requests are tokenised and encoded while they wait for the engine. Closing the stream of a
completion cancels it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from contextvars import Context
from functools import partial
from time import monotonic
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from ray import serve
from ray.exceptions import RayTaskError
from ray.serve.handle import DeploymentHandle

from actors.errors import EmbeddingLost, Overloaded, ServiceError, TooLarge
from actors.options import ModelOptions, Transport
from actors.rows.protocol import RowsPlace
from actors.store.nixl import Receiver
from actors.telemetry.tracing import Origin
from actors.types import Answer, Dtype, Embedding, Media
from encoder_service.api.errors import AtItem
from encoder_service.config import LlmOptions
from encoder_service.intake.limits import Deadline
from encoder_service.llm.calls import ChatCall, ChatEvent, ChatFailed, Finish
from encoder_service.llm.prompt import Prompt, load_tokenizer, place, prompt
from encoder_service.llm.spec import LlmSpec
from router.here import Reader, encode_here
from router.replicas.pinned import by_reference
from router.replicas.serve_fleet import LOST, brief

log = logging.getLogger("ray.serve")

BY_VALUE_SECONDS = 60.0
"""How long rows are taken by value after ids have failed, so that items are not encoded twice all
the time. The connector avoids an encoder that it cannot reach for as long."""
SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)


class ChatMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, namespace="encoder_chat", registry=self.registry)
        seconds = partial(
            Histogram, namespace="encoder_chat", buckets=SECONDS, registry=self.registry
        )
        self.answers = counter(
            "answers_total",
            "Completions, by finish reason: stop, length, tool_calls, cancelled or failed.",
            ["finish"],
        )
        self.tokens = counter(
            "tokens_total",
            "Tokens of finished completions, by kind: prompt (images included) or completion.",
            ["kind"],
        )
        self.encode_seconds = seconds(
            "encode_seconds",
            "Seconds from a request with images until all its embeddings are there, tokenisation "
            "included.",
        )
        self.by_value = counter(
            "by_value_total",
            "Requests for which the language model got rows by value, although it can read them by "
            "id.",
        )
        self.first_token_seconds = seconds(
            "first_token_seconds",
            "Seconds from a request to the first text of its completion, queueing included.",
        )

    def text(self) -> str:
        return generate_latest(self.registry).decode()


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
    ) -> list[Embedding]:
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

    def release(self, embeddings: Sequence[Embedding]) -> None:
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


class ChatEngine(Protocol):
    """Generates completions: model.TransformersEngine or vllm_engine.VllmEngine."""

    by_id: bool
    """Whether it can read kept rows itself, by their ids."""

    def generate(
        self, call: ChatCall, made: Prompt, embeddings: Sequence[Embedding]
    ) -> AsyncGenerator[ChatEvent]:
        """Yields the text as it is generated, then Finish. Closing it ends the generation.

        embeddings: those of the prompt's images and videos, in order, their data in this process,
        or with ids if the engine is `by_id`. Raises EmbeddingLost if it cannot read one by its id.
        """

    def metrics(self) -> str:
        """Returns the engine's own metrics, in Prometheus' text format."""

    async def check_health(self) -> None:
        """Raises Unavailable if the engine cannot generate again."""

    def close(self) -> None:
        """Stops the engine's threads and processes."""


def start(
    options: LlmOptions,
    own: ModelOptions,
    spec: LlmSpec,
    tokenizer: Any,
    places: Callable[[str], Awaitable[RowsPlace]] | None,
) -> ChatEngine:
    """Loads the language model. `places`: Router.place, if encoders keep rows. Raises
    StartError."""
    if options.engine == "vllm":
        from encoder_service.llm.places import PlaceServer
        from encoder_service.llm.vllm_engine import VllmEngine

        return VllmEngine(options, own, spec, tokenizer, PlaceServer(places) if places else None)
    from encoder_service.llm.model import TransformersEngine

    return TransformersEngine(options, own, spec, tokenizer)


class Chat:
    def __init__(
        self,
        options: LlmOptions,
        own: ModelOptions,
        spec: LlmSpec,
        router: DeploymentHandle,
        transport: Transport,
        keeps: bool,
    ) -> None:
        """`transport`: how the encoders hand over embeddings. `keeps`: whether they keep rows."""
        self.options = options
        self.spec = spec
        self.replica = serve.get_replica_context().replica_id.unique_id
        # vLLM's processes own the device; this process has none.
        own_device = options.engine != "vllm"
        reader = Receiver(options.device) if transport == "nixl" and own_device else None
        self.embedder = Embedder(router, spec.dtype, reader)
        self.series = ChatMetrics()
        self.tokenizer = load_tokenizer(own)
        places = router.options(method_name="place").remote if keeps else None
        self.engine = start(options, own, spec, self.tokenizer, places)
        log.info("language model %s is ready: %s", self.replica, spec.id)

    async def complete(self, call: ChatCall) -> AsyncGenerator[ChatEvent | ChatFailed]:
        """Yields the text as it is generated, then Finish. ChatFailed may end it at any point."""
        started, begun, finish = monotonic(), False, "cancelled"
        try:
            async with aclosing(self._complete(call)) as events:
                async for event in events:
                    if not begun:
                        self.series.first_token_seconds.observe(monotonic() - started)
                    begun = True
                    if isinstance(event, Finish):
                        finish = event.reasons[0]
                        self.series.tokens.labels("prompt").inc(event.prompt_tokens)
                        self.series.tokens.labels("completion").inc(event.completion_tokens)
                    yield event
        except Exception as error:
            finish = "failed"
            if isinstance(error, AtItem):
                yield ChatFailed(error.error, error.item)
            elif isinstance(error, ServiceError):
                yield ChatFailed(error)
            else:
                raise
        finally:
            self.series.answers.labels(finish).inc()

    async def _complete(self, call: ChatCall) -> AsyncGenerator[ChatEvent]:
        deadline = Deadline(call.timeout_seconds, "ask for fewer tokens")
        seen = [place(one, self.spec.video) for one in call.media]
        most = call.sampling.max_tokens or self.options.default_max_tokens
        encoding = asyncio.ensure_future(self._encode(call, deadline, keep=self.engine.by_id))
        # Retrieves the exception, which asyncio would otherwise log if the prompt fails first.
        encoding.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            tools = call.tool_use.tools if call.tool_use else ()
            made = await asyncio.to_thread(
                prompt, call.messages, seen, most, self.spec, self.tokenizer, tools
            )
            embeddings = await encoding
        except BaseException:
            encoding.cancel()  # if the prompt was rejected, its items need no encoding
            if encoding.done() and not encoding.cancelled() and not encoding.exception():
                self.embedder.release(encoding.result())
            raise
        lost = ""  # why the engine could not read rows by their ids: then once more, by value
        while True:
            begun = False
            try:
                async with aclosing(self._generate(call, deadline, made, embeddings)) as events:
                    async for event in events:
                        if lost and not begun:
                            self.embedder.ids_failed(lost)
                        begun = True
                        yield event
                return
            except EmbeddingLost as error:
                if begun or lost:
                    raise
                lost = str(error)
            finally:
                self.embedder.release(embeddings)
            embeddings = await self._encode(call, deadline, keep=False)

    async def _generate(
        self, call: ChatCall, deadline: Deadline, made: Prompt, embeddings: list[Embedding]
    ) -> AsyncGenerator[ChatEvent]:
        async with aclosing(self.engine.generate(call, made, embeddings)) as events:
            event: ChatEvent | None = None
            while not isinstance(event, Finish):
                event = await deadline.keep(anext(events))
                yield event

    async def _encode(self, call: ChatCall, deadline: Deadline, *, keep: bool) -> list[Embedding]:
        started = monotonic()
        found = await self.embedder.encode(call.media, deadline, call.origin, keep=keep)
        if call.media:
            self.series.encode_seconds.observe(monotonic() - started)
        if self.engine.by_id and not all(one.reference for one in found):
            self.series.by_value.inc()
        return found

    def scrape(self) -> tuple[str, str]:
        return self.replica, self.series.text() + self.engine.metrics()

    async def check_health(self) -> None:
        """Serve replaces a replica that raises here."""
        await self.engine.check_health()

    def __del__(self) -> None:
        if hasattr(self, "engine"):
            self.engine.close()
