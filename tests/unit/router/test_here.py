"""What is lost before it is read is encoded again, alone, and not for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from actors.errors import EmbeddingLost, InvalidMedia, Overloaded
from actors.store import shared_memory
from actors.store.shared_memory import read
from actors.types import Answer, Bytes, Dtype, Embedding, Media, SharedBytes
from router.here import ATTEMPTS, encode_here
from tests.unit.fleet import embedding, item, right

MEDIA = [item(number) for number in range(3)]


class Encodes:
    """A router that remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[list[Media]] = []
        self.left_seconds: list[float] = []

    async def encode(
        self, media: list[Media], dtype: Dtype, timeout_seconds: float
    ) -> list[Answer]:
        self.asked.append(media)
        self.left_seconds.append(timeout_seconds)
        return [embedding(one, "a") for one in media]


def test_what_is_there_is_given_as_it_is() -> None:
    router = Encodes()
    assert right(MEDIA, asyncio.run(encode_here(router.encode, MEDIA, "bfloat16", 5)))
    assert router.asked == [MEDIA]


def test_a_reader_is_what_reads_and_the_items_say_so() -> None:
    router = Encodes()

    class Reader:
        async def here(self, embedding: Embedding) -> Embedding:
            return replace(embedding, replica="read")

    answers = asyncio.run(encode_here(router.encode, MEDIA, "bfloat16", 5, Reader()))
    assert router.asked == [[replace(one, on_device=True) for one in MEDIA]]
    assert [one.replica for one in answers if isinstance(one, Embedding)] == ["read"] * len(MEDIA)


@pytest.mark.parametrize("losses", range(ATTEMPTS + 1))
def test_only_lost_ones_are_encoded_again(losses: int) -> None:
    router = Encodes()

    second = replace(MEDIA[1], on_device=True)

    class Loses:
        """The second item, for so many times."""

        async def here(self, embedding: Embedding) -> Embedding:
            if len(router.asked) <= losses and right([second], [embedding]):
                raise EmbeddingLost("gone")
            return embedding

    answers = asyncio.run(encode_here(router.encode, MEDIA, "bfloat16", 5, Loses()))
    assert router.asked[1:] == [[second]] * min(losses, ATTEMPTS - 1)
    assert router.left_seconds == sorted(router.left_seconds, reverse=True)
    if losses < ATTEMPTS:
        assert right(MEDIA, answers)
    else:
        assert isinstance(answers[1], EmbeddingLost)
        assert right([MEDIA[0], MEDIA[2]], [answers[0], answers[2]])


def test_what_cannot_be_read_in_time_is_encoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its node is stopped, or cut off: Ray notices after a minute."""
    monkeypatch.setattr(shared_memory, "READ_SECONDS", 0.01)
    router = Encodes()

    async def encode(media: list[Media], dtype: Dtype, timeout_seconds: float) -> list[Answer]:
        first, *others = await router.encode(media, dtype, timeout_seconds)
        if len(router.asked) == 1 and isinstance(first, Embedding):
            first = replace(first, data=SharedBytes(asyncio.Event().wait(), 8))
        return [first, *others]

    answers = asyncio.run(asyncio.wait_for(encode_here(encode, MEDIA, "bfloat16", 5), 2))
    assert right(MEDIA, answers)
    assert router.asked == [MEDIA, MEDIA[:1]]


def test_more_bytes_have_more_time_to_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "READ_SECONDS", 0.01)
    rows = np.zeros(8, np.uint8)

    async def arrive() -> list[Bytes]:
        await asyncio.sleep(0.1)
        return [rows]

    async def run() -> None:
        slow = shared_memory.SLOW_BYTES_PER_SECOND
        assert await read(SharedBytes(arrive(), 8, others_bytes=int(5 * slow))) is rows
        with pytest.raises(EmbeddingLost, match="within 0 s"):
            await read(SharedBytes(arrive(), 8))

    asyncio.run(run())


@pytest.mark.parametrize("order", [range(8), reversed(range(8))], ids=["first", "last"])
def test_reads_have_more_time_while_others_are_in_progress(
    order: Iterable[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray transfers what is read at once in any order."""
    monkeypatch.setattr(shared_memory, "READ_SECONDS", 0.05)
    monkeypatch.setattr(shared_memory, "SLOW_BYTES_PER_SECOND", 80)  # 0.1 s each
    rows = np.zeros(8, np.uint8)

    async def run() -> None:
        async def arrive(turn: int) -> list[Bytes]:
            await asyncio.sleep(0.06 * (turn + 1))
            return [rows]

        found = await asyncio.gather(*(read(SharedBytes(arrive(turn), 8)) for turn in order))
        assert all(one is rows for one in found)
        with pytest.raises(EmbeddingLost, match="within 0 s"):  # those have ended
            await read(SharedBytes(asyncio.Event().wait(), 8))

    asyncio.run(run())


def test_other_errors_stand_as_they_are() -> None:
    bad = InvalidMedia("bad")

    async def encode(media: list[Media], dtype: Dtype, timeout_seconds: float) -> list[Answer]:
        return [bad, embedding(MEDIA[1], "a")]

    answers = asyncio.run(encode_here(encode, MEDIA[:2], "bfloat16", 5))
    assert answers[0] is bad


def test_a_request_that_is_refused_is_refused() -> None:
    async def encode(media: list[Media], dtype: Dtype, timeout_seconds: float) -> list[Answer]:
        raise Overloaded("full")

    with pytest.raises(Overloaded):
        asyncio.run(encode_here(encode, MEDIA, "bfloat16", 5))
