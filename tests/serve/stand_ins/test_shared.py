"""Embeddings above a megabyte: written once, read in place, freed with their last reader."""

from __future__ import annotations

import asyncio
import os
import signal

import numpy as np
import pytest
from ray.serve.handle import DeploymentHandle

from actors.errors import EmbeddingLost
from actors.store.shared_memory import INLINE_BYTES, here, read, share_together
from actors.store.writer import tensor
from actors.types import Answer, Dtype, Embedding, Media, SharedBytes
from router.here import encode_here
from tests.serve.conftest import Cluster
from tests.serve.object_store import used
from tests.serve.stand_in import BIG, BIG_BYTES, item, right, status
from tests.waiting import within


def big(number: int) -> Media:
    return item(number, 100, BIG + b"%d" % number)


def encode(router: DeploymentHandle, media: list[Media]) -> list[Answer]:
    answers: list[Answer] = router.encode.remote(media, "bfloat16", 30.0).result(timeout_s=30)
    return answers


def test_large_ones_travel_by_reference_and_are_views(router: DeploymentHandle) -> None:
    (answer,) = encode(router, [big(1)])
    assert isinstance(answer, Embedding)
    assert answer.data.size_bytes == BIG_BYTES  # type: ignore[union-attr]
    first, second = (asyncio.run(here(answer)) for _ in range(2))
    assert right([big(1)], [first])
    assert isinstance(first.data, np.ndarray)
    assert isinstance(second.data, np.ndarray)
    assert first.data.ctypes.data == second.data.ctypes.data  # the same memory: nothing was copied
    assert not first.data.flags.writeable
    rows = tensor(first)
    assert rows.shape == answer.shape
    assert rows.data_ptr() == first.data.ctypes.data


def test_rows_that_are_shared_together_are_one_object_and_each_is_its_own(cluster: Cluster) -> None:
    arrays = [np.full(2 * INLINE_BYTES // 3 + place, place, np.uint8) for place in range(4)]
    shared = [one for one in share_together(arrays) if isinstance(one, SharedBytes)]
    assert len({one.object_ref for one in shared}) == 1
    assert {one.object_bytes for one in shared} == {sum(array.nbytes for array in arrays)}
    for array, one in zip(arrays, shared, strict=True):
        found = asyncio.run(read(one))
        assert one.size_bytes == found.nbytes
        assert (found == array).all()
    pairs = share_together(arrays, arrays[2].nbytes + arrays[3].nbytes)
    assert len({one.object_ref for one in pairs if isinstance(one, SharedBytes)}) == 2
    assert share_together(arrays[:1])[0] is arrays[0], "few bytes stay where they are"


def test_small_ones_travel_by_value(router: DeploymentHandle) -> None:
    (answer,) = encode(router, [item(2, 100)])
    assert isinstance(answer, Embedding)
    assert isinstance(answer.data, np.ndarray)


def test_memory_is_given_back_with_the_last_reader(router: DeploymentHandle) -> None:
    media = [big(number) for number in range(10, 18)]
    before = used()
    answers = encode(router, media)
    found = asyncio.run(read(answers[0].data))  # type: ignore[arg-type, union-attr]
    assert used().bytes >= len(media) * BIG_BYTES
    del answers
    within(20, lambda: used().bytes - before.bytes < 2 * BIG_BYTES)
    assert found[:32].tobytes().hex() == media[0].digest  # its memory lives as long as the view
    del found
    within(20, lambda: used().bytes - before.bytes < BIG_BYTES)
    assert used().spilled_bytes == before.spilled_bytes


def test_what_dies_with_its_replica_is_encoded_again(router: DeploymentHandle) -> None:
    """A replica dies between its answer and the reading of it."""
    media = [big(30), item(31, 100)]
    processes = {one.replica: one.metadata["process"] for one in status(router).replicas}
    calls: list[list[Media]] = []

    async def encode_and_die(
        media: list[Media], dtype: Dtype, timeout_seconds: float
    ) -> list[Answer]:
        answers: list[Answer] = await router.encode.remote(media, dtype, timeout_seconds)
        calls.append(media)
        first = answers[0]
        if len(calls) == 1 and isinstance(first, Embedding):
            assert isinstance(first.data, SharedBytes)
            os.kill(processes[first.replica], signal.SIGKILL)
            with pytest.raises(EmbeddingLost):
                await asyncio.wait_for(read_for_ever(first), 60)
        return answers

    answers = asyncio.run(encode_here(encode_and_die, media, "bfloat16", 60))
    assert right(media, answers)
    assert calls == [media, media[:1]]


async def read_for_ever(embedding: Embedding) -> None:
    """Reads until Ray knows that it is lost."""
    while await here(embedding):
        await asyncio.sleep(0.05)
