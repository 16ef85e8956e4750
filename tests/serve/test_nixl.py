"""Rows move from device to device by NIXL, which moves the CPU's memory in the same way.

Runs where the extra `nixl` is installed.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from actors.errors import EmbeddingLost
from actors.families.registry import read
from actors.options import ModelOptions
from actors.spec.model_spec import ModelSpec
from actors.store.nixl import Receiver
from actors.store.writer import tensor
from actors.types import (
    Answer,
    Dtype,
    Embedding,
    Media,
    ReceivedBytes,
    RemoteBytes,
    SharedBytes,
)
from encoder_service.client import Client
from encoder_service.config import LimitOptions
from encoder_service.intake.media import probe
from router.here import encode_here
from router.replicas.pinned import by_reference
from tests.images import jpeg
from tests.serve.conftest import Cluster
from tests.serve.deployed import FEW, deployed
from tests.serve.object_store import direct_objects, own_process
from tests.serve.wide import WIDTH, wide
from tests.waiting import within

pytest.importorskip("nixl")
pytestmark = [pytest.mark.extended, pytest.mark.timeout(300)]

EMBEDDING_BYTES = 25 * WIDTH * 4
ROOM = 4
"""Embeddings for which an encoder's memory for readers has room."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelOptions:
    return wide(tmp_path_factory.mktemp("wide"))


class Consumer:
    """Stands in for a language model."""

    def __init__(self) -> None:
        router = serve.get_deployment_handle("Router", "nixl")
        self.router = by_reference(router, "encode")
        self.reader = Receiver("cpu")
        self.held: list[Answer] = []

    async def encode(self, media: list[Media]) -> list[tuple[bool, str, list[float]]]:
        """For each item: whether it came from the device, its source, and the sums of its rows."""
        return [
            told(one) for one in await encode_here(self.router.remote, media, *HOW, self.reader)
        ]

    async def hold(self, media: list[Media]) -> list[bool]:
        """Keeps answers without reading them. Returns which of them lie on the encoder's device."""
        self.held = await self.router.remote([replace(m, on_device=True) for m in media], *HOW)
        return [await is_remote(one) for one in self.held]

    async def let_go(self) -> None:
        """Drops the answers that it keeps."""
        self.held = []

    async def encode_and_kill(self, media: list[Media], processes: dict[str, int]) -> list[int]:
        """Kills an encoder between its answer and the reading of it. Returns the items per
        attempt."""
        calls: list[int] = []

        async def encode(media: list[Media], dtype: Dtype, seconds: float) -> list[Answer]:
            answers: list[Answer] = await self.router.remote(media, dtype, seconds)
            calls.append(len(media))
            first = answers[0]
            if len(calls) == 1 and isinstance(first, Embedding):
                os.kill(processes[first.replica], signal.SIGKILL)
                with pytest.raises(EmbeddingLost):
                    await asyncio.wait_for(self.read_for_ever(first), 30)
            return answers

        for answer in await encode_here(encode, media, *HOW, self.reader):
            told(answer)
        return calls

    async def read_for_ever(self, embedding: Embedding) -> None:
        """Reads until the embedding is known to be lost."""
        while await self.reader.here(embedding):
            await asyncio.sleep(0.05)


HOW: tuple[Dtype, float] = ("float32", 60.0)


def told(answer: Answer) -> tuple[bool, str, list[float]]:
    assert isinstance(answer, Embedding), answer
    rows = tensor(answer)
    assert rows.shape == answer.shape
    return isinstance(answer.data, ReceivedBytes), answer.source, rows.double().sum(1).tolist()


async def is_remote(answer: Answer) -> bool:
    assert isinstance(answer, Embedding)
    assert isinstance(answer.data, SharedBytes)
    reference: Any = answer.data.object_ref
    return isinstance((await reference)[0], RemoteBytes)


@pytest.fixture(scope="module")
def consumer(cluster: Cluster, model: ModelOptions) -> Iterator[DeploymentHandle]:
    sections = {
        "encoder": {"replicas": 2, "transport": "nixl", "nixl_bytes": ROOM * EMBEDDING_BYTES},
        "graphs": {"token_budgets": [32, 128]},
        "cache": {"max_bytes": 3 * EMBEDDING_BYTES},
    }
    with deployed("nixl", model.model_dump(), **sections):
        own = serve.deployment(Consumer, ray_actor_options=FEW, max_ongoing_requests=50).bind()
        yield serve.run(own, name="consumer", route_prefix=None)
        serve.delete("consumer")


@pytest.fixture(scope="module")
def spec(model: ModelOptions) -> ModelSpec:
    return read(model)


def item(spec: ModelSpec, name: str) -> Media:
    """An image that differs from all others."""
    return probe(jpeg(160, 160) + name.encode(), "image", spec, LimitOptions())


def taken(cluster: Cluster) -> float:
    """Bytes that all encoders hold for readers, by their metrics."""
    page = httpx.get(f"{cluster.http}/metrics", timeout=30).text
    lines = [line for line in page.splitlines() if line.startswith("encoder_nixl_bytes{")]
    assert len(lines) == 2
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def processes() -> dict[str, Any]:
    """Handles of the actors of both applications, by name."""
    return {
        actor["name"]: ray.get_actor(actor["name"], namespace=actor["namespace"])
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if actor["name"].startswith(("SERVE_REPLICA::nixl#", "SERVE_REPLICA::consumer#"))
    }


def test_rows_are_those_of_shared_memory(
    cluster: Cluster, consumer: DeploymentHandle, spec: ModelSpec
) -> None:
    media = item(spec, "first")
    ((remote, source, sums),) = consumer.encode.remote([media]).result(timeout_s=60)
    assert (remote, source) == (True, "graph")
    with Client(cluster.http) as client:
        (by_http,) = client.encode([media.data], "float32")
    assert by_http.source == "cache", "which holds rows of its own, on the host"
    assert by_http.torch().double().sum(1).tolist() == sums
    (again,) = consumer.encode.remote([media]).result(timeout_s=60)
    assert again == (False, "cache", sums)


def test_memory_is_free_when_its_readers_are_through(
    cluster: Cluster, consumer: DeploymentHandle, spec: ModelSpec
) -> None:
    """Reads ten times what there is room for, a few at a time. Ray then knows of none any more."""
    found = []
    for turn in range(20):
        media = [item(spec, f"{turn} {place}") for place in range(4)]
        found += consumer.encode.remote(media).result(timeout_s=60)
    assert sum(remote for remote, *_ in found) > len(found) // 2
    within(20, lambda: taken(cluster) == 0)
    known = {
        name: ray.get(one.__ray_call__.remote(direct_objects)) for name, one in processes().items()
    }
    assert len(known) == 5  # two encoders, router, ingress, consumer
    assert set(known.values()) == {0}, known


def test_what_finds_no_room_goes_by_shared_memory(
    cluster: Cluster, consumer: DeploymentHandle, spec: ModelSpec
) -> None:
    media = [item(spec, f"held {place}") for place in range(4 * ROOM)]
    remote = consumer.hold.remote(media).result(timeout_s=60)
    assert sum(remote) == 2 * ROOM
    assert taken(cluster) == 2 * ROOM * EMBEDDING_BYTES
    consumer.let_go.remote().result(timeout_s=60)
    within(20, lambda: taken(cluster) == 0)


def test_what_dies_with_its_replica_is_encoded_again(
    consumer: DeploymentHandle, spec: ModelSpec
) -> None:
    encoders = {
        name.rsplit("#", 1)[1]: ray.get(one.__ray_call__.remote(own_process))
        for name, one in processes().items()
        if "#Encoder#" in name
    }
    calls = consumer.encode_and_kill.remote([item(spec, "last")], encoders).result(timeout_s=90)
    assert calls == [1, 1]
