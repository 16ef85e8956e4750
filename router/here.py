"""Encode, and have the bytes in this process: what is lost on the way is encoded again.

For whoever reads embeddings, as the ingress and language models do. `Router.encode` alone gives
references, for those who hand them on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Protocol

from actors.errors import EmbeddingLost
from actors.shared import here
from actors.types import Answer, Dtype, Embedding, Media

Encode = Callable[[list[Media], Dtype, float], Awaitable[list[Answer]]]
"""`Router.encode`, or `.encode.remote` of a handle to the Router deployment."""

Finish = Callable[[list[Media], list[Answer]], Awaitable[list[Answer]]]
"""Answers to answers, with EmbeddingLost for what could not be finished."""

Read = Callable[[Embedding], Awaitable[Embedding]]
"""The same with its data in this process. Raises EmbeddingLost."""

ATTEMPTS = 3
"""How often an item is encoded that is lost before it is read: its encoder, or its router."""


class Reader(Protocol):
    """Reads rows from an encoder's device: received.Receiver."""

    async def here(self, embedding: Embedding) -> Embedding:
        """The same with its data in this process. Raises EmbeddingLost."""


async def encode_here(
    encode: Encode,
    media: Sequence[Media],
    dtype: Dtype,
    timeout_seconds: float,
    reader: Reader | None = None,
) -> list[Answer]:
    """The answers in the order of `media`; the data of embeddings are arrays, not to be written to.

        answers = await encode_here(handle.encode.remote, media, "bfloat16", 60)

    With a reader they are on its device where they were left on the encoder's. Raises as
    `Router.encode` does.
    """
    if reader is None:
        return await encode_until(encode, answers_here, media, dtype, timeout_seconds)
    finish = partial(answers_here, read=reader.here)
    media = [replace(one, on_device=True) for one in media]
    return await encode_until(encode, finish, media, dtype, timeout_seconds)


async def encode_until(
    encode: Encode,
    finish: Finish,
    media: Sequence[Media],
    dtype: Dtype,
    timeout_seconds: float,
) -> list[Answer]:
    """The answers in the order of `media`, finished; what is lost until then is encoded again."""
    deadline = monotonic() + timeout_seconds
    answers: dict[int, Answer] = {}
    wanted = list(range(len(media)))
    for _ in range(ATTEMPTS):
        left = max(0.0, deadline - monotonic())
        items = [media[place] for place in wanted]
        found = await finish(items, await encode(items, dtype, left))
        answers.update(zip(wanted, found, strict=True))
        wanted = [place for place in wanted if isinstance(answers[place], EmbeddingLost)]
        if not wanted:
            break
    return [answers[place] for place in range(len(media))]


async def answers_here(
    media: list[Media], answers: list[Answer], read: Read = here
) -> list[Answer]:
    """All of them, read at the same time."""
    return await asyncio.gather(*(answer_here(answer, read) for answer in answers))


async def answer_here(answer: Answer, read: Read) -> Answer:
    """The same with its data in this process; EmbeddingLost in its place where it is lost."""
    if not isinstance(answer, Embedding):
        return answer
    try:
        return await read(answer)
    except EmbeddingLost as error:
        return error
