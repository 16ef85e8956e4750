"""Encodes items and reads their embeddings in this process. Rows lost on the way are encoded again.

`Router.encode` itself returns references to Ray's shared memory, for callers that pass them on,
unless its router borrows rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from time import monotonic
from typing import Protocol

from actors.errors import EmbeddingLost
from actors.store.shared_memory import here
from actors.types import Answer, Dtype, Embedding, Media

Encode = Callable[[list[Media], Dtype, float], Awaitable[list[Answer]]]
"""`Router.encode`, or `.encode.remote` of a handle to the Router deployment."""

ATTEMPTS = 3
"""How many times an item is encoded at most if its embedding is lost before it is read."""


class Reader(Protocol):
    """Reads rows from an encoder's device: actors.store.nixl.Receiver."""

    async def here(self, embedding: Embedding) -> Embedding:
        """The embedding with its data in this process. Raises EmbeddingLost."""


async def encode_here(
    encode: Encode,
    media: Sequence[Media],
    dtype: Dtype,
    timeout_seconds: float,
    reader: Reader | None = None,
) -> list[Answer]:
    """Returns the answers in the order of `media`. Embeddings have their data as read-only arrays.

        answers = await encode_here(handle.encode.remote, media, "bfloat16", 60)

    `reader` moves rows that stayed on the encoder's device to its own device. Raises as
    `Router.encode` does.
    """
    if reader:
        media = [replace(one, on_device=True) for one in media]
    deadline = monotonic() + timeout_seconds
    answers: dict[int, Answer] = {}
    wanted = list(range(len(media)))
    for _ in range(ATTEMPTS):
        left = max(0.0, deadline - monotonic())
        given = await encode([media[place] for place in wanted], dtype, left)
        found = await asyncio.gather(*(answer_here(answer, reader) for answer in given))
        answers.update(zip(wanted, found, strict=True))
        wanted = [place for place in wanted if isinstance(answers[place], EmbeddingLost)]
        if not wanted:
            break
    return [answers[place] for place in range(len(media))]


async def answer_here(answer: Answer, reader: Reader | None = None) -> Answer:
    """The answer with its data in this process, or EmbeddingLost if it is lost."""
    if not isinstance(answer, Embedding):
        return answer
    try:
        return await (reader.here(answer) if reader else here(answer))
    except EmbeddingLost as error:
        return error
