"""Sends requests to a running service, so many at a time, and notes what came of each."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal, Protocol

import numpy as np

from actors.types import DTYPE_BYTES, Dtype
from encoder_service.client.embedding import ServiceError
from encoder_service.client.transports import Transport
from encoder_service.wire.documents import RequestItem

ProtocolName = Literal["http", "grpc", "reference", "handle"]
"""How callers reach the service. reference: over HTTP, the embeddings stay in shared memory and ids
come back; handle: from inside Ray, as a language model does, where they always stay."""


@dataclass(frozen=True, slots=True)
class Load:
    """How much is sent. Whichever of `requests` and `seconds` is there first ends it."""

    concurrency: int
    requests: int
    seconds: float
    timeout_seconds: float
    dtype: Dtype
    protocol: ProtocolName = "http"
    per_second: float | None = None
    """Requests come at random times, whatever became of those before: `concurrency` is unused."""
    seed: int = 0
    """Of those times."""


@dataclass(frozen=True, slots=True)
class Answered:
    """What the service says of one request."""

    work_seconds: float
    """It decoded, waited for the device and encoded: the longest of each over the items."""
    embedding_bytes: int
    """Sent back, or left in shared memory."""


class Way(Protocol):
    """How requests reach the service."""

    async def encode(self, images: list[bytes]) -> Answered:
        """One request. Raises ServiceError."""

    async def close(self) -> None:
        """No more of them."""


@dataclass(slots=True)
class Result:
    """What came back."""

    latencies_seconds: list[float] = field(default_factory=list)
    """Of requests that were answered."""
    overheads_seconds: list[float] = field(default_factory=list)
    """The same, less what the service reports for decoding and encoding."""
    images: int = 0
    sent_bytes: int = 0
    embedding_bytes: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    wall_seconds: float = 0

    def percentiles_ms(self, *percents: float) -> list[float]:
        """Of the latencies. Raises RuntimeError where nothing was answered."""
        if not self.latencies_seconds:
            raise RuntimeError(f"nothing was answered: {dict(self.errors)}")
        return [float(one) for one in np.percentile(self.latencies_seconds, percents) * 1e3]


class Wire:
    """Over HTTP or gRPC."""

    def __init__(self, transport: Transport, load: Load) -> None:
        self.transport = transport
        kept = {"reference": True} if load.protocol == "reference" else {}
        self.options = {"dtype": load.dtype} | kept

    async def encode(self, images: list[bytes]) -> Answered:
        """See Way."""
        items = [RequestItem("image", image, None) for image in images]
        document = await self.transport.encode(items, self.options)
        return Answered(work_seconds(document["timings"]), embedding_bytes(document["items"]))

    async def close(self) -> None:
        """See Way."""
        await self.transport.close()


async def send(way: Way, load: Load, requests: Iterator[list[bytes]]) -> Result:
    """Runs the load, then closes the way."""
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
    """One request, due at `since`, noted in `result`."""
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
    """Of callers that ran at the same time."""
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
    """What the service says it decoded, waited for the device and encoded."""
    stages = ("queue_ms", "preprocess_ms", "encode_ms")
    return float(sum(timings[stage] for stage in stages)) / 1e3


def embedding_bytes(items: list[dict[str, Any]]) -> int:
    """Of the items of a response, wherever their data are."""
    return sum(math.prod(item["shape"]) * DTYPE_BYTES[item["dtype"]] for item in items)
