"""Thousands of embeddings by every way out: memory ends where it began, and nothing is spilled.

`make soak` runs 10,000; the other tests a few hundred.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import count

import pytest
import ray
import torch
from ray import serve
from ray.serve.handle import DeploymentHandle

from actors.families.registry import read
from actors.options import ModelOptions
from actors.spec.model_spec import ModelSpec
from actors.types import Embedding, SharedBytes
from encoder_service.client import AsyncClient, Client
from encoder_service.config import LimitOptions
from encoder_service.intake.media import probe
from router.here import encode_here
from tests.images import jpeg
from tests.serve.conftest import Cluster
from tests.serve.deployed import deployed
from tests.serve.object_store import own_private_bytes, used
from tests.serve.wide import WIDTH, wide
from tests.waiting import within

pytestmark = pytest.mark.extended

TOKENS = 25
EMBEDDING_BYTES = TOKENS * WIDTH * 4
KEPT_BYTES = 20 * 2**20
"""Size of the cache, and of the references, in each of two replicas."""
ROUND = 10
"""Embeddings of one round, two of them by reference. One image is in every round."""
CALLERS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelOptions:
    return wide(tmp_path_factory.mktemp("wide"))


@pytest.fixture(scope="module")
def router(cluster: Cluster, model: ModelOptions) -> Iterator[DeploymentHandle]:
    sections = {
        "encoder": {"replicas": 2},
        "graphs": {"token_budgets": [32, 128]},
        "cache": {"max_bytes": KEPT_BYTES},
        "references": {"ttl_seconds": 300, "max_bytes": KEPT_BYTES},
    }
    with deployed("soak", model.model_dump(), **sections):
        yield serve.get_deployment_handle("Router", "soak")


def test_items_are_found_one_by_one_and_in_any_dtype(
    cluster: Cluster, router: DeploymentHandle
) -> None:
    first, second = (jpeg(160, 160) + name for name in (b"first", b"second"))
    with Client(cluster.http) as client:
        (computed,) = client.encode([first], "float32")
        found, new = client.encode([first, second], "float32")
        assert [one.source for one in (computed, found, new)] == ["graph", "cache", "graph"]
        assert found.data == computed.data
        (halved,) = client.encode([first], "bfloat16")
        assert halved.source == "cache"
        assert torch.equal(halved.torch(), computed.torch().bfloat16())


@pytest.mark.parametrize(
    "embeddings",
    [100, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
)
def test_memory_ends_where_it_began(
    cluster: Cluster, router: DeploymentHandle, model: ModelOptions, embeddings: int
) -> None:
    soak = Soak(cluster.http, router, read(model))
    asyncio.run(soak.run(8 * ROUND))  # fills the caches, which stay full from here on
    before = soak.settled()
    spilled, memory = used().spilled_bytes, private_bytes()
    asyncio.run(soak.run(embeddings))
    assert soak.found > embeddings // ROUND // 2  # the image that is in every round, from the cache
    after = soak.settled()
    print(f"{embeddings} embeddings of {EMBEDDING_BYTES} bytes; object store {before} -> {after}")
    for process, size in private_bytes().items():
        print(f"{process}: {memory[process]} -> {size} bytes of its own")
        assert size < memory[process] * 1.3 + 50 * 2**20
    assert after <= before + EMBEDDING_BYTES
    assert used().spilled_bytes == spilled


class Soak:
    """Callers that get embeddings by value, by handle and by reference."""

    def __init__(self, url: str, router: DeploymentHandle, spec: ModelSpec) -> None:
        self.url = url
        self.router = router
        self.spec = spec
        self.image = jpeg(160, 160)
        self.numbers = count()
        self.found = 0

    async def run(self, embeddings: int) -> None:
        """Gets `embeddings` embeddings in rounds, a few at a time."""
        rounds = iter(range(embeddings // ROUND))

        async def caller(client: AsyncClient) -> None:
            for _ in rounds:
                await self.round(client)

        async with AsyncClient(self.url) as client:
            await asyncio.gather(*(caller(client) for _ in range(CALLERS)))

    async def round(self, client: AsyncClient) -> None:
        """Five over HTTP, one of which is the same in every round; three by handle; two by id."""
        answers = await client.encode([self.image, *self.images(4)], "float32")
        assert all(len(one.data) == EMBEDDING_BYTES for one in answers)
        self.found += answers[0].source == "cache"
        await self.by_handle(self.images(3))
        for kept in await client.encode(self.images(2), "float32", reference=True):
            assert len((await client.fetch(kept.reference)).data) == EMBEDDING_BYTES
            await client.release(kept.reference)

    async def by_handle(self, images: Sequence[bytes]) -> None:
        """Gets them as a language model does."""
        media = [probe(image, "image", self.spec, LimitOptions()) for image in images]
        raw = await self.router.encode.remote(media[:1], "float32", 60.0)
        assert isinstance(raw[0].data, SharedBytes)
        for one in await encode_here(self.router.encode.remote, media, "float32", 60):
            assert isinstance(one, Embedding)

    def images(self, number: int) -> list[bytes]:
        """New images: whatever follows a JPEG's end changes its digest, but is not decoded."""
        return [self.image + b"%d" % next(self.numbers) for _ in range(number)]

    def settled(self) -> int:
        """Bytes in the object store, once no more is left than caches may keep."""
        most = 2 * KEPT_BYTES + EMBEDDING_BYTES
        within(60, lambda: used().bytes <= most)
        return used().bytes


def private_bytes() -> dict[str, int]:
    """Private memory of each process of the service. Shared memory is the store's."""
    found = {}
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["name"].startswith("SERVE_REPLICA::soak#"):
            handle = ray.get_actor(actor["name"], namespace=actor["namespace"])
            found[actor["name"]] = ray.get(handle.__ray_call__.remote(own_private_bytes))
    return found
