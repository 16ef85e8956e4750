"""Embeddings above a megabyte: written once, read where they lie, freed with their last reader."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest
from ray import serve
from ray.serve.handle import DeploymentHandle

from actors.errors import EmbeddingLost
from actors.shared import here, read
from actors.tensors import tensor
from actors.types import Answer, Dtype, Embedding, Media, SharedBytes
from router.here import encode_here
from router.options import RouterOptions
from tests.serve.conftest import Cluster
from tests.serve.object_store import used
from tests.serve.stand_in import BIG, BIG_BYTES, application, item, right
from tests.serve.test_kill import status, within


@pytest.fixture(scope="module")
def router(cluster: Cluster) -> Iterator[DeploymentHandle]:
    yield serve.run(application(RouterOptions()), name="shared", route_prefix=None)
    serve.delete("shared")


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


def test_small_ones_travel_by_value(router: DeploymentHandle) -> None:
    (answer,) = encode(router, [item(2, 100)])
    assert isinstance(answer, Embedding)
    assert isinstance(answer.data, np.ndarray)


def test_memory_is_given_back_with_the_last_reader(router: DeploymentHandle) -> None:
    media = [big(number) for number in range(10, 18)]
    before = used()
    answers = encode(router, media)
    found = asyncio.run(read(answers[0].data))  # type: ignore[union-attr]
    assert used().bytes >= len(media) * BIG_BYTES
    del answers
    within(20, lambda: used().bytes - before.bytes < 2 * BIG_BYTES)
    assert found[:32].tobytes().hex() == media[0].digest  # its memory stays as long as the view
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
    """Until Ray has seen that it is lost."""
    while await here(embedding):
        await asyncio.sleep(0.05)
