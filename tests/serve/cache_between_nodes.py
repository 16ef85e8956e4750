"""An image that an encoder on one node has encoded is a hit for an encoder on another node, also
after the first node is lost. Run by test_several_nodes.py.

The shared cache is in Redis, or in a folder if Redis is not installed. tests/unit/store tests both,
and two encoders that share a folder.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import which

from ray import serve
from redis import Redis, RedisError

from encoder_service.app import build
from encoder_service.bench.cluster import free_ports
from encoder_service.bench.load import scrape
from encoder_service.client import Client, Embedding
from tests.chaos.faults import replicas
from tests.images import jpeg
from tests.serve.head_restart import redis_server
from tests.serve.nodes import Node, node_of, nodes
from tests.serve.three_nodes import options, ready
from tests.waiting import within

READ_BEFORE, READ_AFTER = [jpeg(64, 64), jpeg(256, 256)], [jpeg(96, 96), jpeg(224, 256)]
"""Read by the other node before and after the first one is lost. One of each has rows over a
megabyte."""
LATER = jpeg(128, 64)

Entries = Callable[[], int]
"""How many embeddings the store has."""


def main() -> None:
    # Ray declares a lost node dead after five checks: after 5 s instead of 15 s.
    os.environ.update(RAY_health_check_period_ms="1000")
    with (
        tempfile.TemporaryDirectory() as name,
        # Each has room for one encoder. The second is the cluster's head, which stays.
        nodes({"num_cpus": 3}, {"num_cpus": 3}) as (second, first),
    ):
        folder, redis = Path(name), bool(which("redis-server"))
        with in_redis() if redis else in_folder(folder) as (url, entries):
            serve_with(folder, url, [first, second])
            hits(first, second, entries)
        if redis:
            started = time.monotonic()
            assert encode(second, LATER).source == "graph"
            assert encode(second, READ_BEFORE[0]).source == "graph"
            print(f"two images after Redis ended: {time.monotonic() - started:.1f} s")
        else:
            print("no redis-server: a folder was tried")
    print("all nodes did their part")


@contextmanager
def in_folder(folder: Path) -> Iterator[tuple[str, Entries]]:
    yield f"file://{folder}/cache", lambda: len(list(folder.glob("cache/*/*")))


@contextmanager
def in_redis() -> Iterator[tuple[str, Entries]]:
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory() as folder, redis_server(Path(folder), port) as password:
        url = f"redis://:{password}@127.0.0.1:{port}/0"
        client = Redis.from_url(url)
        within(10, lambda: listens(client))
        yield url, lambda: int(client.dbsize())


def listens(client: Redis) -> bool:
    try:
        return bool(client.ping())
    except RedisError:
        return False


def serve_with(folder: Path, url: str, found: list[Node]) -> None:
    """Deploys an encoder on each node, without caches of their own."""
    args = options(folder, 2).model_dump() | {"cache": {"shared": {"url": url}}}
    serve.run(build(args), name="encoder", route_prefix="/")
    within(60, lambda: all(ready(one) == 2 for one in found))
    assert {node_of(one) for one in replicas("Encoder")} == {one.id for one in found}


def encode(node: Node, image: bytes) -> Embedding:
    """By the encoder of the node, because routers prefer it where no encoder is busy."""
    with Client(node.http, retries=0) as client:
        (found,) = client.encode([image], "float32")
    return found


def same(found: Embedding, other: Embedding, source: str) -> None:
    assert found.source == source
    assert (found.data, found.shape) == (other.data, other.shape)


def shared_hits(node: Node) -> int:
    """Of the node's encoder."""
    (name,) = (one for one in replicas("Encoder") if node_of(one) == node.id)
    own = {("replica", name.rpartition("#")[2]), ("deployment", "Encoder")}
    found = scrape(node.http)
    return int(found["encoder_shared_cache_hits_total", frozenset(own)])


def hits(first: Node, second: Node, entries: Entries) -> None:
    """The first node encodes, the second finds. Then the first is killed."""
    images = [*READ_BEFORE, *READ_AFTER]
    known = {image: encode(first, image) for image in images}
    assert {one.source for one in known.values()} == {"graph"}
    within(10, lambda: entries() == len(images))
    assert shared_hits(second) == 0
    for count, image in enumerate(READ_BEFORE, 1):
        same(encode(second, image), known[image], "cache")
        assert shared_hits(second) == count
    first.signal(signal.SIGKILL)
    for image in READ_AFTER:
        same(encode(second, image), known[image], "cache")
    assert entries() == len(images)


if __name__ == "__main__":
    main()
