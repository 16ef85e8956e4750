"""A Chat replica without Serve: a refused prompt, whose images are not encoded for nobody, and its
health."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from actors.errors import InvalidRequest, Unavailable
from actors.families.registry import read
from actors.media.decoder import Decoder
from actors.options import ModelOptions
from actors.telemetry.tracing import Origin
from actors.types import Embedding, Media
from encoder_service.config import LimitOptions, LlmOptions
from encoder_service.intake.limits import Deadline
from encoder_service.intake.media import probe
from encoder_service.llm import spec as llm_spec
from encoder_service.llm.calls import ChatCall, ChatFailed, SamplingParams
from encoder_service.llm.chat import Chat, ChatEngine, ChatMetrics
from encoder_service.llm.embedder import Embedder
from encoder_service.llm.prompt import load_tokenizer
from tests.images import jpeg

TINY = ModelOptions(id="qwen3vl-tiny", load_format="dummy")
CPU = LlmOptions(num_gpus=0, device="cpu")


class Endless(Embedder):
    """Encodes until it is cancelled."""

    def __init__(self) -> None:
        self.begun = self.cancelled = False

    async def encode(
        self, media: Sequence[Media], deadline: Deadline, origin: Origin, *, keep: bool = False
    ) -> list[Embedding]:
        self.begun = True
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        raise AssertionError


def test_the_images_of_a_refused_prompt_are_not_encoded_further() -> None:
    tower = read(TINY)
    chat = object.__new__(Chat)  # without weights, and not on Serve
    chat.options = CPU
    chat.spec = replace(llm_spec.read(CPU, TINY, tower), max_model_len=20)
    chat.tokenizer = load_tokenizer(TINY)
    chat.series = ChatMetrics()
    chat.embedder = embedder = Endless()
    chat.engine = cast(ChatEngine, SimpleNamespace(by_id=False, close=lambda: None))
    media = probe(jpeg(64, 64), "image", tower, LimitOptions())
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a" * 50}]}

    async def ask() -> list[object]:
        call = ChatCall((message,), (media,), SamplingParams(), timeout_seconds=60)
        events: list[object] = [event async for event in chat.complete(call)]
        await asyncio.sleep(0)  # for the cancelled task to end
        return events

    (refused,) = asyncio.run(asyncio.wait_for(ask(), 30))
    assert isinstance(refused, ChatFailed)
    assert isinstance(refused.error, InvalidRequest)
    assert (embedder.begun, embedder.cancelled) == (True, True)
    assert 'encoder_chat_answers_total{finish="failed"} 1.0' in chat.series.text()


def test_a_replica_that_cannot_decode_any_more_is_unhealthy() -> None:
    async def healthy() -> None:
        pass

    chat = object.__new__(Chat)
    engine = SimpleNamespace(check_health=healthy, close=lambda: None)
    chat.engine = cast(ChatEngine, engine)
    for decoder in (None, SimpleNamespace(alive=lambda: True)):
        chat.decoder = cast(Decoder | None, decoder)
        asyncio.run(chat.check_health())
    chat.decoder = cast(Decoder, SimpleNamespace(alive=lambda: False))
    with pytest.raises(Unavailable):
        asyncio.run(chat.check_health())
