"""The calls of the chat API: admit, then ask the language model, once more if it is lost.

Knows nothing of Ray, HTTP or torch: the replicas are a `ChatBackend`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from actors.errors import InvalidRequest, ServiceError, Unavailable
from actors.telemetry.request_context import ORIGIN
from actors.types import Media
from encoder_service.api.deadline import Deadline
from encoder_service.api.errors import AtItem
from encoder_service.intake.admission import Admission
from encoder_service.llm.options import LlmOptions
from encoder_service.llm.schema import ChatRequest, UnknownModel, item, parse
from encoder_service.llm.spec import LlmSpec
from encoder_service.llm.types import Call, Event, Finish
from encoder_service.ops.offload import offload
from encoder_service.wire.documents import RequestItem
from encoder_service.wire.formats import WireError, check_json, read_json

ATTEMPTS = 3
"""How many replicas may be lost under a request of which nothing was answered yet. What is lost of
its embeddings is not counted: router/here.py tries that again."""

MOST_VALUES = 2**20
"""Of a body, as bounds.py counts them: the commas of long texts among them."""

MOST_CHARACTERS_A_TOKEN = 100
"""More than any text has on average: what is longer is refused before it is tokenised."""


class ReplicaLost(Unavailable):
    """The language model's replica died: another may answer."""


class ChatBackend(Protocol):
    """The language model's replicas. Raises only errors of this service."""

    def complete(self, call: Call) -> AsyncGenerator[Event]:
        """The answer as it grows; closing it ends the generation."""

    async def ready_replicas(self) -> int:
        """Replicas that may be given work."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A request that can be read."""

    request: ChatRequest
    items: tuple[RequestItem, ...]
    """Its images and videos, in order."""

    def place(self, index: int) -> str:
        """Where an image or video stands in the request."""
        return list(self.request.media())[index][0]


class ChatService:
    """One front door to the language model."""

    def __init__(
        self, options: LlmOptions, spec: LlmSpec, admission: Admission, backend: ChatBackend
    ) -> None:
        self.options = options
        self.spec = spec
        self.admission = admission
        self.backend = backend

    async def parse(self, body: bytes) -> Parsed:
        """Raises InvalidRequest, or UnknownModel."""
        parsed = await offload(len(body), self._parse, body)
        if parsed.request.model != self.spec.id:
            named = parsed.request.model[:100]
            raise UnknownModel(f"model {named!r} is not here, but {self.spec.id!r} is")
        return parsed

    async def admit(self, parsed: Parsed) -> Call:
        """Raises ServiceError, or AtItem with the position of the image or video at fault."""
        media: list[Media] = []
        admitted = await self.admission.admit(parsed.items) if parsed.items else []
        for index, one in enumerate(admitted):
            if isinstance(one, ServiceError):
                raise AtItem(index, one)
            media.append(one)
        tokens = sum(one.plan.tokens for one in media)
        if tokens >= self.spec.max_model_len:  # before the encoders work for nothing
            raise InvalidRequest(
                f"the images and videos are {tokens} tokens; the maximum context length is "
                f"{self.spec.max_model_len} (llm.max_model_len): send less, or scale them down"
            )
        return Call(
            messages=parsed.request.template_messages(),
            media=tuple(media),
            sampling=parsed.request.sampling(),
            timeout_seconds=self.options.timeout_seconds,
            origin=ORIGIN.get(),
        )

    def _parse(self, body: bytes) -> Parsed:
        try:
            check_json(body, MOST_VALUES)
            request = parse(read_json(body))
        except WireError as error:
            raise InvalidRequest(str(error)) from None
        characters = request.characters()
        if characters > MOST_CHARACTERS_A_TOKEN * self.spec.max_model_len:
            raise InvalidRequest(
                f"the messages are {characters} characters; the maximum context length is "
                f"{self.spec.max_model_len} tokens (llm.max_model_len): send less"
            )
        return Parsed(request, tuple(item(*one) for one in request.media()))

    async def ready_replicas(self) -> int:
        """Raises Unavailable if there is none."""
        ready = await self.backend.ready_replicas()
        if not ready:
            raise Unavailable("no language model is ready yet: weights are loaded")
        return ready

    async def complete(self, call: Call) -> tuple[str, Finish]:
        """The whole answer. A replica that is lost costs time, not the answer."""
        deadline = self._deadline(call)
        for attempt in range(1, ATTEMPTS + 1):
            pieces: list[str] = []
            try:
                async with aclosing(self._events(call, deadline)) as events:
                    async for event in events:
                        if isinstance(event, Finish):
                            return "".join(pieces), event
                        pieces.append(event.text)
            except ReplicaLost:
                if attempt == ATTEMPTS:
                    raise
        raise AssertionError("an answer without an end. This is a bug.")

    async def stream(self, call: Call) -> AsyncGenerator[Event]:
        """The answer as it grows. A replica may be lost unnoticed before the first piece."""
        deadline = self._deadline(call)
        for attempt in range(1, ATTEMPTS + 1):
            begun = False
            try:
                async with aclosing(self._events(call, deadline)) as events:
                    async for event in events:
                        begun = True
                        yield event
                return
            except ReplicaLost:
                if begun or attempt == ATTEMPTS:
                    raise

    async def _events(self, call: Call, deadline: Deadline) -> AsyncGenerator[Event]:
        """One attempt. The deadline is around what is waited for, not what the consumer does."""
        async with aclosing(self.backend.complete(call)) as events:
            while True:
                event = await deadline.keep(anext(events))
                yield event
                if isinstance(event, Finish):
                    return

    def _deadline(self, call: Call) -> Deadline:
        return Deadline(call.timeout_seconds, "ask for fewer tokens, or raise llm.timeout_seconds")
