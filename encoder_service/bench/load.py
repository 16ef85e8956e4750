"""Sends requests to a running service, so many at a time, and notes what came of each."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from encoder_service.embedding import ServiceError
from encoder_service.transports import Transport, connect
from encoder_service.wire import RequestItem


@dataclass(frozen=True, slots=True)
class Load:
    """How much is sent. Whichever of `requests` and `seconds` is there first ends it."""

    concurrency: int
    requests: int
    seconds: float
    timeout_seconds: float
    dtype: str


@dataclass(slots=True)
class Result:
    """What came back."""

    latencies_seconds: list[float] = field(default_factory=list)
    """Of requests that were answered."""
    overheads_seconds: list[float] = field(default_factory=list)
    """The same, less what the service reports for decoding and encoding."""
    images: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    wall_seconds: float = 0


async def send(
    url: str, load: Load, requests: Iterator[list[bytes]], done: Callable[[], object]
) -> Result:
    """Runs the load; `done` is called after each request."""
    result = Result()
    transport = connect(url, None, load.timeout_seconds)
    end = time.perf_counter() + load.seconds
    left = load.requests

    async def worker() -> None:
        nonlocal left
        while left > 0 and time.perf_counter() < end:
            left -= 1
            await one(transport, next(requests), load.dtype, result)
            done()

    started = time.perf_counter()
    try:
        await asyncio.gather(*(worker() for _ in range(load.concurrency)))
    finally:
        await transport.close()
    result.wall_seconds = time.perf_counter() - started
    return result


async def one(transport: Transport, images: list[bytes], dtype: str, result: Result) -> None:
    """One request, noted in `result`."""
    items = [RequestItem("image", image, None) for image in images]
    started = time.perf_counter()
    try:
        document = await transport.encode(items, {"dtype": dtype})
    except ServiceError as error:
        result.errors[error.type] += 1
        return
    taken = time.perf_counter() - started
    result.latencies_seconds.append(taken)
    result.overheads_seconds.append(taken - work_seconds(document["timings"]))
    result.images += len(images)
    result.sent_bytes += sum(len(image) for image in images)
    result.received_bytes += sum(len(item["data"]) for item in document["items"])


def work_seconds(timings: dict[str, Any]) -> float:
    """What the service says it decoded, waited for the device and encoded."""
    stages = ("queue_ms", "preprocess_ms", "encode_ms")
    return float(sum(timings[stage] for stage in stages)) / 1e3
