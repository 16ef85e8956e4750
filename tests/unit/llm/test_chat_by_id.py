"""A chat whose language model reads rows by their ids, and loses them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import cast

import pytest

from actors.errors import EmbeddingLost
from actors.families.registry import read
from actors.options import ModelOptions
from actors.telemetry.tracing import Origin
from actors.types import Embedding, Media
from encoder_service.config import LimitOptions, LlmOptions
from encoder_service.intake.limits import Deadline
from encoder_service.intake.media import probe
from encoder_service.llm import spec as llm_spec
from encoder_service.llm.calls import (
    ChatCall,
    ChatEvent,
    ChatFailed,
    Finish,
    Piece,
    SamplingParams,
)
from encoder_service.llm.chat import Chat, ChatEngine, ChatMetrics
from encoder_service.llm.embedder import Embedder, Input
from encoder_service.llm.prompt import Prompt, load_tokenizer
from tests.images import jpeg
from tests.unit.fleet import embedding

TINY = ModelOptions(id="qwen3vl-tiny", load_format="dummy")
CPU = LlmOptions(num_gpus=0, device="cpu")
DONE = Finish(("stop",), 5, 1)
Script = Sequence[ChatEvent | EmbeddingLost]


class Encoders(Embedder):
    def __init__(self) -> None:
        self.kept: list[bool] = []
        self.released: list[str] = []
        self.failures: list[str] = []

    async def encode(
        self, media: Sequence[Media], deadline: Deadline, origin: Origin, *, keep: bool = False
    ) -> list[Embedding]:
        self.kept.append(keep)
        name = f"a.b.{len(self.kept)}" if keep else ""
        return [replace(embedding(one, "a"), reference=name) for one in media]

    def release(self, embeddings: Sequence[Input]) -> None:
        self.released += [one.reference for one in embeddings if one.reference]

    def ids_failed(self, why: str) -> None:
        self.failures.append(why)


class Engine:
    """Each generation plays the next script."""

    by_id = True

    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts)

    async def generate(
        self, call: ChatCall, made: Prompt, embeddings: Sequence[Embedding]
    ) -> AsyncGenerator[ChatEvent]:
        for event in self.scripts.pop(0):
            if isinstance(event, EmbeddingLost):
                raise event
            yield event


def completed(
    engine: Engine, max_model_len: int = 2**15
) -> tuple[list[ChatEvent | ChatFailed], Encoders]:
    tower = read(TINY)
    chat = object.__new__(Chat)  # without weights, and not on Serve
    chat.options = CPU
    chat.spec = replace(llm_spec.read(CPU, TINY, tower), max_model_len=max_model_len)
    chat.tokenizer = load_tokenizer(TINY)
    chat.series = ChatMetrics()
    chat.embedder = encoders = Encoders()
    media = probe(jpeg(64, 64), "image", tower, LimitOptions())
    message = {"role": "user", "content": [{"type": "image"}]}

    async def ask() -> list[ChatEvent | ChatFailed]:
        chat.engine = cast(ChatEngine, engine)
        call = ChatCall((message,), (media,), SamplingParams(), timeout_seconds=60)
        found = [event async for event in chat.complete(call)]
        del chat.engine  # which has nothing to close
        return found

    return asyncio.run(asyncio.wait_for(ask(), 30)), encoders


def test_ids_are_released_after_the_last_token() -> None:
    events, encoders = completed(Engine([Piece("a"), DONE]))
    assert events == [Piece("a"), DONE]
    assert (encoders.kept, encoders.released, encoders.failures) == ([True], ["a.b.1"], [])


def test_rows_that_the_engine_lost_are_encoded_again_and_taken_by_value() -> None:
    events, encoders = completed(Engine([EmbeddingLost("gone")], [Piece("a"), DONE]))
    assert events == [Piece("a"), DONE]
    assert (encoders.kept, encoders.released) == ([True, False], ["a.b.1"])
    assert encoders.failures == ["gone"]


@pytest.mark.parametrize(
    "scripts",
    [
        [[Piece("a"), EmbeddingLost("gone")]],  # its text has been sent
        [[EmbeddingLost("gone")], [EmbeddingLost("gone")]],  # the rows were there
    ],
)
def test_what_cannot_be_begun_again_fails(scripts: list[Script]) -> None:
    (*_, last), encoders = completed(Engine(*scripts))
    assert isinstance(last, ChatFailed)
    assert isinstance(last.error, EmbeddingLost)
    assert encoders.released == ["a.b.1"]
    assert not encoders.failures


def test_ids_of_a_prompt_that_is_refused_are_released() -> None:
    (refused,), encoders = completed(Engine(), max_model_len=5)
    assert isinstance(refused, ChatFailed)
    assert (encoders.kept, encoders.released) == ([True], ["a.b.1"])
