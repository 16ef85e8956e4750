"""The calls of the chat API: parse, admit, ask the language model, retry if its replica is lost.

Knows neither Ray, HTTP nor torch. The replicas are a `ChatBackend`; ingress.py has the real one.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from actors.errors import InvalidRequest, ServiceError, Unavailable
from actors.telemetry.tracing import ORIGIN
from actors.types import Media
from encoder_service.api.errors import AtItem
from encoder_service.config import LlmOptions
from encoder_service.intake.limits import Deadline, offload
from encoder_service.intake.media import Admission
from encoder_service.llm.schema import (
    ChatCall,
    ChatEvent,
    ChatRequest,
    Finish,
    UnknownModel,
    item,
    parse,
)
from encoder_service.llm.spec import LlmSpec
from encoder_service.wire.documents import RequestItem
from encoder_service.wire.formats import WireError, check_json, read_json

ATTEMPTS = 3
"""Attempts at a request whose replica is lost before any text was sent. router/here.py retries lost
embeddings; they do not count here."""

MOST_VALUES = 2**20
"""Limit for a body, as wire/formats.py counts: the commas of long texts count too."""

MOST_CHARACTERS_A_TOKEN = 100
"""More than any text has on average. A longer text is rejected before it is tokenised."""


class ReplicaLost(Unavailable):
    """The language model's replica died; another one may answer."""


class ChatBackend(Protocol):
    """The language model's replicas. Raises only the errors of actors/errors.py."""

    def complete(self, call: ChatCall) -> AsyncGenerator[ChatEvent]:
        """The text as it grows, then Finish. Closing it ends the generation."""

    async def ready_replicas(self) -> int:
        """How many replicas accept work."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A valid request, not yet admitted."""

    request: ChatRequest
    items: tuple[RequestItem, ...]

    def place(self, index: int) -> str:
        return list(self.request.media())[index][0]


class ChatService:
    """What llm/http.py calls."""

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
            raise UnknownModel(f"model {named!r} is not served here; {self.spec.id!r} is")
        return parsed

    async def admit(self, parsed: Parsed) -> ChatCall:
        """Raises ServiceError, or AtItem with the position of the image or video at fault."""
        media: list[Media] = []
        admitted = await self.admission.admit(parsed.items) if parsed.items else []
        for index, one in enumerate(admitted):
            if isinstance(one, ServiceError):
                raise AtItem(index, one)
            media.append(one)
        tokens = sum(one.plan.tokens for one in media)
        if tokens >= self.spec.max_model_len:  # before the encoders work in vain
            raise InvalidRequest(
                f"the images and videos are {tokens} tokens; the maximum context length is "
                f"{self.spec.max_model_len} (llm.max_model_len): send less, or scale them down"
            )
        return ChatCall(
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
            raise Unavailable("no language model is ready yet: they load weights")
        return ready

    async def complete(self, call: ChatCall) -> tuple[str, Finish]:
        """The whole text. If the replica is lost, the request is tried again on another one."""
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

    async def stream(self, call: ChatCall) -> AsyncGenerator[ChatEvent]:
        """The text as it grows. A replica that is lost before the first event is replaced."""
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

    async def _events(self, call: ChatCall, deadline: Deadline) -> AsyncGenerator[ChatEvent]:
        """One attempt. The deadline covers waiting, not the time that the consumer takes."""
        async with aclosing(self.backend.complete(call)) as events:
            while True:
                event = await deadline.keep(anext(events))
                yield event
                if isinstance(event, Finish):
                    return

    def _deadline(self, call: ChatCall) -> Deadline:
        return Deadline(call.timeout_seconds, "ask for fewer tokens, or raise llm.timeout_seconds")
