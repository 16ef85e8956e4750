"""Sends requests to a running service, and reads from /metrics the work that it did meanwhile."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from actors.types import DTYPE_BYTES
from encoder_service.bench.mix import Load
from encoder_service.client.items import ServiceError
from encoder_service.client.transports import Transport
from encoder_service.wire.documents import RequestItem

Labels = frozenset[tuple[str, str]]
Samples = dict[tuple[str, Labels], float]


@dataclass(frozen=True, slots=True)
class Answered:
    work_seconds: float
    """Decoding, waiting for the device and encoding: the longest of each over the items."""
    embedding_bytes: int
    """Sent back, or left in shared memory."""


class Way(Protocol):
    async def encode(self, images: list[bytes]) -> Answered:
        """Sends one request. Raises ServiceError."""

    async def close(self) -> None:
        """Called after the last request."""


@dataclass(slots=True)
class Result:
    latencies_seconds: list[float] = field(default_factory=list)
    """Of requests answered without an error."""
    overheads_seconds: list[float] = field(default_factory=list)
    """Latency minus work_seconds."""
    images: int = 0
    sent_bytes: int = 0
    embedding_bytes: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    wall_seconds: float = 0

    def percentiles_ms(self, *percents: float) -> list[float]:
        """Of the latencies. Raises RuntimeError if no request was answered."""
        if not self.latencies_seconds:
            raise RuntimeError(f"nothing was answered: {dict(self.errors)}")
        return [float(one) for one in np.percentile(self.latencies_seconds, percents) * 1e3]


class OverWire:
    """Over HTTP or gRPC."""

    def __init__(self, transport: Transport, load: Load) -> None:
        self.transport = transport
        kept = {"reference": True} if load.protocol == "reference" else {}
        self.options = {"dtype": "bfloat16"} | kept

    async def encode(self, images: list[bytes]) -> Answered:
        items = [RequestItem("image", image, None) for image in images]
        document = await self.transport.encode(items, self.options)
        return Answered(work_seconds(document["timings"]), embedding_bytes(document["items"]))

    async def close(self) -> None:
        await self.transport.close()


async def send(way: Way, load: Load, requests: Iterator[list[bytes]]) -> Result:
    """Sends the load, then closes `way`."""
    result = Result()
    end = time.perf_counter() + load.seconds
    left = load.requests

    async def worker() -> None:
        nonlocal left
        while left > 0 and time.perf_counter() < end:
            left -= 1
            await one(way, next(requests), result, time.perf_counter())

    async def arrivals(per_second: float) -> None:
        random, due = Random(load.seed), time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(left):
                due += random.expovariate(per_second)
                if due >= end:
                    break
                images = next(requests)
                await asyncio.sleep(due - time.perf_counter())
                group.create_task(one(way, images, result, due))

    started = time.perf_counter()
    try:
        if load.per_second:
            await arrivals(load.per_second)
        else:
            await asyncio.gather(*(worker() for _ in range(load.concurrency)))
    finally:
        await way.close()
    result.wall_seconds = time.perf_counter() - started
    return result


async def one(way: Way, images: list[bytes], result: Result, since: float) -> None:
    """Sends one request, due at `since`, and adds it to `result`."""
    try:
        answered = await way.encode(images)
    except ServiceError as error:
        result.errors[error.type] += 1
        return
    taken = time.perf_counter() - since
    result.latencies_seconds.append(taken)
    result.overheads_seconds.append(taken - answered.work_seconds)
    result.images += len(images)
    result.sent_bytes += sum(len(image) for image in images)
    result.embedding_bytes += answered.embedding_bytes


def merged(results: Iterable[Result]) -> Result:
    """The result of callers that ran at the same time."""
    whole = Result()
    for one in results:
        whole.latencies_seconds += one.latencies_seconds
        whole.overheads_seconds += one.overheads_seconds
        whole.images += one.images
        whole.sent_bytes += one.sent_bytes
        whole.embedding_bytes += one.embedding_bytes
        whole.errors += one.errors
        whole.wall_seconds = max(whole.wall_seconds, one.wall_seconds)
    return whole


def work_seconds(timings: dict[str, Any]) -> float:
    stages = ("queue_ms", "preprocess_ms", "encode_ms")
    return float(sum(timings[stage] for stage in stages)) / 1e3


def embedding_bytes(items: list[dict[str, Any]]) -> int:
    return sum(math.prod(item["shape"]) * DTYPE_BYTES[item["dtype"]] for item in items)


@dataclass(frozen=True, slots=True)
class WorkDone:
    """What the replicas did between two scrapes, all together."""

    patches: float
    hits: float
    misses: float
    tokens: float
    padded_tokens: float
    replica_patches: Mapping[str, float]

    @property
    def hit_rate(self) -> float:
        """Items encoded by a graph over all items."""
        return ratio(self.hits, self.hits + self.misses)

    @property
    def padding(self) -> float:
        """Padding tokens over all tokens computed."""
        return ratio(self.padded_tokens, self.tokens + self.padded_tokens)

    @property
    def balance(self) -> float:
        """Patches of the busiest replica over the mean; 1 is even."""
        loads = self.replica_patches.values()
        return ratio(max(loads, default=0), sum(loads) / max(1, len(loads)))


def scrape(url: str) -> Samples:
    page = httpx.get(f"{url}/metrics", timeout=30).raise_for_status().text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def work_between(before: Samples, after: Samples) -> WorkDone:
    """The growth of the counters. A replica that is only in `after` began at zero."""
    grown = {key: value - before.get(key, 0) for key, value in after.items()}

    def total(name: str) -> float:
        return sum(value for (known, _), value in grown.items() if known == name)

    replicas = {
        dict(labels)["replica"]: value
        for (name, labels), value in grown.items()
        if name == "encoder_patches_total"
    }
    return WorkDone(
        patches=total("encoder_patches_total"),
        hits=total("encoder_graph_hits_total"),
        misses=total("encoder_graph_misses_total"),
        tokens=total("encoder_tokens_total"),
        padded_tokens=total("encoder_padded_tokens_total"),
        replica_patches=replicas,
    )


def ratio(part: float, whole: float) -> float:
    """0 if both are 0."""
    return part / whole if whole else 0.0
