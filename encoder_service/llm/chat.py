"""The language model's Serve deployment: tokenises while the encoders work, then generates.

One replica owns one device and generates one answer at a time; what waits for its turn is tokenised
and encoded already. Answers are streams, cancelled by whoever stops reading.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from threading import Event as Flag
from time import monotonic

import torch
from ray import serve
from ray.serve.handle import DeploymentHandle

from actors.errors import ServiceError, TooLarge, Unavailable
from actors.options import ModelOptions, Transport
from actors.store.nixl import Receiver
from actors.store.rows import tensor
from actors.types import Embedding
from encoder_service.api.deadline import Deadline
from encoder_service.api.errors import AtItem
from encoder_service.llm import model, tokenizer
from encoder_service.llm.embedder import Embedder
from encoder_service.llm.generate import Emit, Generator
from encoder_service.llm.metrics import ChatMetrics
from encoder_service.llm.options import LlmOptions
from encoder_service.llm.placeholders import placed
from encoder_service.llm.prompt import Prompt, prompt
from encoder_service.llm.spec import LlmSpec
from encoder_service.llm.types import Call, Event, Failed, Finish, Piece, Sampling

log = logging.getLogger("ray.serve")


class Chat:
    """Answers chats. app.py sets replicas and resources."""

    def __init__(
        self,
        options: LlmOptions,
        own: ModelOptions,
        spec: LlmSpec,
        router: DeploymentHandle,
        transport: Transport = "shared_memory",
    ) -> None:
        """`transport`: of the encoders."""
        self.options = options
        self.spec = spec
        self.replica = serve.get_replica_context().replica_id.unique_id
        reader = Receiver(options.device) if transport == "nixl" else None
        self.embedder = Embedder(router, spec.dtype, reader)
        self.series = ChatMetrics()
        self.language = tokenizer.load(own)
        self.generator = Generator(model.load(own, options.device), self.language.tokenizer)
        self.thread = ThreadPoolExecutor(1, "generate")
        self.broken = ""
        self._warm()
        log.info("language model %s is ready: %s", self.replica, spec.id)

    def _warm(self) -> None:
        """A short answer: what loads at first use loads before we are ready."""
        made = prompt([{"role": "user", "content": "a"}], [], 2, self.spec, self.language)
        self._generate(made, [], Sampling(temperature=0), lambda text: None, Flag())

    async def complete(self, call: Call) -> AsyncGenerator[Event | Failed]:
        """The answer as it grows, then Finish; or Failed, whatever came before."""
        started, begun, finish = monotonic(), False, "cancelled"
        try:
            async with aclosing(self._complete(call)) as events:
                async for event in events:
                    if not begun:
                        self.series.first_token_seconds.observe(monotonic() - started)
                    begun = True
                    if isinstance(event, Finish):
                        finish = event.reason
                        self.series.tokens.labels("prompt").inc(event.prompt_tokens)
                        self.series.tokens.labels("completion").inc(event.completion_tokens)
                    yield event
        except AtItem as error:
            finish = "failed"
            yield Failed(error.error, error.item)
        except ServiceError as error:
            finish = "failed"
            yield Failed(error)
        except Exception:
            finish = "failed"
            raise
        finally:
            self.series.answers.labels(finish).inc()

    async def _complete(self, call: Call) -> AsyncGenerator[Event]:
        deadline = Deadline(call.timeout_seconds, "ask for fewer tokens")
        sampling = call.sampling
        seen = placed(call.media, self.spec.video)
        most = sampling.max_tokens or self.options.default_max_tokens
        encoding = asyncio.ensure_future(self._encode(call, deadline))
        encoding.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen
        try:
            made = await asyncio.to_thread(
                prompt, call.messages, seen, most, self.spec, self.language
            )
            embeddings = await encoding
        finally:
            encoding.cancel()  # what is refused by its prompt is not encoded for nobody
        loop, flag = asyncio.get_running_loop(), Flag()
        texts: asyncio.Queue[str | None] = asyncio.Queue()

        def emit(text: str | None) -> None:
            loop.call_soon_threadsafe(texts.put_nowait, text)

        work = loop.run_in_executor(
            self.thread, self._generate, made, embeddings, sampling, emit, flag
        )
        work.add_done_callback(lambda _: texts.put_nowait(None))
        try:
            waiting: list[str | None] = []
            while None not in waiting:
                waiting = [await deadline.keep(texts.get())]
                # What has come meanwhile goes along: a message for each token would cost more.
                while not texts.empty():
                    waiting.append(texts.get_nowait())
                if text := "".join(one for one in waiting if one):
                    yield Piece(text)
            yield await work
        finally:
            flag.set()
            work.cancel()

    async def _encode(self, call: Call, deadline: Deadline) -> list[Embedding]:
        started = monotonic()
        found = await self.embedder.encode(call.media, deadline, call.origin)
        if call.media:
            self.series.encode_seconds.observe(monotonic() - started)
        return found

    def _generate(
        self,
        made: Prompt,
        embeddings: Sequence[Embedding],
        sampling: Sampling,
        emit: Emit,
        flag: Flag,
    ) -> Finish:
        """In the thread that owns the device."""
        device = self.generator.model.device
        try:
            rows = [tensor(one).to(device) for one in embeddings]
            inputs = model.inputs(made, rows, self.spec)
            return self.generator.generate(inputs, sampling, made.max_tokens, emit, flag)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            raise TooLarge(
                f"the device's memory does not hold {len(made.ids)} tokens and their answer: "
                "send less, or lower llm.max_model_len"
            ) from None
        except torch.AcceleratorError as error:
            self.broken = str(error)
            raise

    def scrape(self) -> tuple[str, str]:
        """This replica's id, and its series in Prometheus' text format."""
        return self.replica, self.series.text()

    async def check_health(self) -> None:
        """Serve replaces a replica that raises here: CUDA does not recover from most errors."""
        if self.broken:
            raise Unavailable(f"the device failed: {self.broken}")

    def __del__(self) -> None:
        if hasattr(self, "thread"):
            self.thread.shutdown(wait=False, cancel_futures=True)
