"""Times embeddings on their way from an encoder's memory to an array in a consumer's process.

Three deployments without a model stand in for encoder, router and language model. Time runs from
when the encoder has the rows until the consumer has them. Copying as many bytes within one process
is timed in the same run, because ratios to it are comparable between machines.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import numpy as np
from ray import serve
from ray.serve.handle import DeploymentHandle
from rich.table import Table

from actors.store.kept import EmbeddingCache
from actors.store.shared_memory import read, share
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Bytes, Embedding, SharedBytes, Timings
from encoder_service.bench.cluster import cluster

Way = Literal["reference", "value", "bytes"]
WAYS: dict[Way, str] = {
    "reference": "by reference, as in the service",
    "value": "by value, as an array",
    "bytes": "by value, as pickled bytes",
}
SIZE_BYTES, REPEATS = 67_000_000, 20
"""One 1080p image of Qwen3-VL-8B."""
CPUS, ACTOR = 8, {"num_cpus": 0.1}
"""CPUs declared to Ray, and those that each replica requests."""
MOST_EMBEDDINGS = 16
"""How many embeddings the object store has room for."""
HITS = 4
"""Items of the cache test: a request of four images."""
WARM_UPS = 3


@dataclass(frozen=True, slots=True)
class Sent:
    """Rows on their way, and when they were ready, in seconds of the monotonic clock."""

    data: Bytes | SharedBytes | bytes
    since: float


class Source:
    """Stands in for the encoder."""

    def __init__(self, size_bytes: int) -> None:
        self.rows = np.random.default_rng(0).integers(0, 255, size_bytes, np.uint8)
        self.cache = EmbeddingCache(HITS * size_bytes, EncoderMetrics())

    async def encode(self, way: Way) -> Sent:
        since = time.monotonic()
        if way == "reference":
            return Sent(await asyncio.to_thread(share, self.rows), since)
        return Sent(self.rows if way == "value" else self.rows.tobytes(), since)

    async def hits(self) -> tuple[float, list[Embedding]]:
        """Seconds that this process spends on items in its cache, and the cache entries."""
        if not self.cache.bytes:
            for name in map(str, range(HITS)):
                data = await asyncio.to_thread(share, self.rows)
                shape = (1, self.rows.nbytes // 2)
                made = Embedding(data, "bfloat16", shape, (1, 1, 1), "graph", Timings(0, 0, 0))
                self.cache.put((name,), made)
        since = time.perf_counter()
        found = [self.cache.get((name,), 1) for name in map(str, range(HITS))]
        return time.perf_counter() - since, [entry for entry in found if entry]


class Passing:
    """Stands in for the router: passes responses on."""

    def __init__(self, source: DeploymentHandle) -> None:
        self.source = source

    async def encode(self, way: Way) -> Sent:
        sent: Sent = await self.source.encode.remote(way)
        return sent

    async def hits(self) -> tuple[float, list[Embedding]]:
        found: tuple[float, list[Embedding]] = await self.source.hits.remote()
        return found


class Consumer:
    """Stands in for a language model."""

    def __init__(self, passing: DeploymentHandle, size_bytes: int) -> None:
        self.passing = passing
        self.own = np.ones(size_bytes, np.uint8)

    async def receive(self, way: Way) -> tuple[float, float]:
        """Seconds until this process has an array of the rows, and until it has read it once."""
        sent: Sent = await self.passing.encode.remote(way)
        data = sent.data
        rows = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else await read(data)
        here = time.monotonic()
        np.copyto(self.own, rows)
        return here - sent.since, time.monotonic() - sent.since

    async def receive_hits(self) -> tuple[float, float]:
        """Seconds in the source, and until this process has the arrays."""
        since = time.perf_counter()
        in_source, entries = await self.passing.hits.remote()
        await asyncio.gather(*(read(entry.data) for entry in entries))
        return in_source, time.perf_counter() - since

    async def copy(self) -> float:
        """Seconds of a copy within this process, both buffers warm."""
        other = np.ones_like(self.own)
        since = time.perf_counter()
        np.copyto(other, self.own)
        return time.perf_counter() - since


@contextmanager
def application(size_bytes: int) -> Iterator[DeploymentHandle]:
    source = serve.deployment(Source, ray_actor_options=ACTOR).bind(size_bytes)
    passing = serve.deployment(Passing, ray_actor_options=ACTOR).bind(source)
    consumer = serve.deployment(Consumer, ray_actor_options=ACTOR).bind(passing, size_bytes)
    try:
        yield serve.run(consumer, name="dataplane", route_prefix=None)
    finally:
        serve.delete("dataplane")


def run() -> dict[str, Any]:
    """Measures on a private cluster."""
    with cluster(CPUS, object_store_bytes=MOST_EMBEDDINGS * SIZE_BYTES):
        return measure(SIZE_BYTES, REPEATS)


def measure(size_bytes: int, repeats: int) -> dict[str, Any]:
    """Medians in seconds, on the running cluster. The ways take turns."""
    taken: dict[str, list[Sequence[float]]] = {name: [] for name in ("copy", "hits", *WAYS)}
    with application(size_bytes) as consumer:
        for turn in range(WARM_UPS + repeats):
            found: dict[str, Sequence[float]] = {
                way: consumer.receive.remote(way).result() for way in WAYS
            }
            found["hits"] = consumer.receive_hits.remote().result()
            found["copy"] = (consumer.copy.remote().result(),)
            if turn >= WARM_UPS:
                for name, seconds in found.items():
                    taken[name].append(seconds)
    return {"size_bytes": size_bytes, "repeats": repeats} | {
        name: [median(column) for column in zip(*rows, strict=True)] for name, rows in taken.items()
    }


def table(report: dict[str, Any]) -> Table:
    (copied,), size = report["copy"], report["size_bytes"]
    title = f"{size / 1e6:.0f} MB from encoder to consumer, median of {report['repeats']}"
    shown = Table(title=title)
    for name in ("", "ms until available", "copies", "GB/s", "ms until read once"):
        shown.add_column(name, justify="right" if name else "left")
    shown.add_row("a copy within one process", ms(copied), "1.0", f"{size / copied / 1e9:.1f}", "")
    for way, name in WAYS.items():
        here, was_read = report[way]
        shown.add_row(
            name, ms(here), f"{here / copied:.1f}", f"{size / here / 1e9:.1f}", ms(was_read)
        )
    in_source, here = report["hits"]
    shown.add_row(f"{HITS} cache hits, time in the encoder", ms(in_source), "", "", "")
    shown.add_row(f"{HITS} cache hits", ms(here), f"{here / copied / HITS:.2f}", "", "")
    return shown


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"
