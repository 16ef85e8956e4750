"""The language model's Serve deployment: tokenises while the encoders work, then generates.

Requests are tokenised and encoded while they wait for the engine. Closing the stream of a
completion cancels it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from time import monotonic
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from ray import serve
from ray.serve.handle import DeploymentHandle

from actors.errors import EmbeddingLost, ServiceError, Unavailable
from actors.media.decoder import Decoder
from actors.options import ModelOptions, PreprocessOptions, Transport
from actors.rows.protocol import RowsPlace
from actors.store.nixl import Receiver
from encoder_service.api.errors import AtItem
from encoder_service.config import LlmOptions
from encoder_service.intake.limits import Deadline
from encoder_service.llm.calls import ChatCall, ChatEvent, ChatFailed, Finish
from encoder_service.llm.embedder import Embedder, Input, LocalEmbedder
from encoder_service.llm.prompt import Prompt, load_tokenizer, place, prompt
from encoder_service.llm.spec import LlmSpec

log = logging.getLogger("ray.serve")

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
            "Seconds from a request with images until all its embeddings (with llm.local_encoder: "
            "patches) are there, tokenisation included.",
        )
        self.preprocessed = counter(
            "preprocessed_items_total", "Items decoded and patchified, with llm.local_encoder."
        )
        self.decode_restarts = counter(
            "decode_restarts_total",
            "Decoder processes replaced because they exited or hung, with llm.local_encoder.",
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


class ChatEngine(Protocol):
    """Generates completions: model.TransformersEngine or vllm_engine.VllmEngine."""

    by_id: bool
    """Whether it can read kept rows itself, by their ids."""

    def generate(
        self, call: ChatCall, made: Prompt, inputs: Sequence[Input]
    ) -> AsyncGenerator[ChatEvent]:
        """Yields the text as it is generated, then Finish. Closing it ends the generation.

        inputs: of the prompt's images and videos, in order, with their data in this process, or
        embeddings with ids if the engine is `by_id`. Raises EmbeddingLost if it cannot read one by
        its id.
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
        tower: ModelOptions,
        preprocess: PreprocessOptions,
    ) -> None:
        """`transport`: how the encoders hand over embeddings. `keeps`: whether they keep rows.
        `tower`: what they encode with."""
        self.options = options
        self.spec = spec
        self.replica = serve.get_replica_context().replica_id.unique_id
        # vLLM's processes own the device; this process has none.
        own_device = options.engine != "vllm"
        reader = Receiver(options.device) if transport == "nixl" and own_device else None
        self.series = ChatMetrics()
        self.decoder: Decoder | None = None
        if options.local_encoder:
            self.decoder = Decoder(tower, preprocess, self.series)
            self.embedder: Embedder = LocalEmbedder(router, spec.dtype, self.decoder)
        else:
            self.embedder = Embedder(router, spec.dtype, reader)
        self.tokenizer = load_tokenizer(own)
        by_id = keeps and not options.local_encoder
        places = router.options(method_name="place").remote if by_id else None
        self.engine = start(options, own, spec, self.tokenizer, places)
        if self.decoder:
            self.decoder.wait_until_started()
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
            inputs = await encoding
        except BaseException:
            encoding.cancel()  # if the prompt was rejected, its items need no encoding
            if encoding.done() and not encoding.cancelled() and not encoding.exception():
                self.embedder.release(encoding.result())
            raise
        lost = ""  # why the engine could not read rows by their ids: then once more, by value
        while True:
            begun = False
            try:
                async with aclosing(self._generate(call, deadline, made, inputs)) as events:
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
                self.embedder.release(inputs)
            inputs = await self._encode(call, deadline, keep=False)

    async def _generate(
        self, call: ChatCall, deadline: Deadline, made: Prompt, inputs: Sequence[Input]
    ) -> AsyncGenerator[ChatEvent]:
        async with aclosing(self.engine.generate(call, made, inputs)) as events:
            event: ChatEvent | None = None
            while not isinstance(event, Finish):
                event = await deadline.keep(anext(events))
                yield event

    async def _encode(self, call: ChatCall, deadline: Deadline, *, keep: bool) -> Sequence[Input]:
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
        if self.decoder and not self.decoder.alive():
            raise Unavailable("the decoding processes do not start again")
        await self.engine.check_health()

    def __del__(self) -> None:
        if hasattr(self, "engine"):
            self.engine.close()
