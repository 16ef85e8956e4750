"""Sends requests to a running service, and reads from /metrics how much work it did meanwhile.

One Python process cannot send as much as a GPU encodes, so callers are Ray processes that share a
load. A caller over HTTP or gRPC is an ordinary client; one by handle does what a language model
does.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, cycle, islice
from random import Random
from typing import Any

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from actors.families.registry import read
from actors.types import DTYPE_BYTES, Dtype, Embedding
from encoder_service.api.answer import timings
from encoder_service.api.errors import fault
from encoder_service.bench.cluster import APPLICATION, Cluster
from encoder_service.bench.mix import Protocol, Shape, requests
from encoder_service.client.direct import DirectRows
from encoder_service.client.grpc_transport import GrpcTransport
from encoder_service.client.items import ServiceError
from encoder_service.client.transports import Transport, connect
from encoder_service.config import ServiceOptions
from encoder_service.intake.media import probe
from encoder_service.wire.documents import RequestItem

# Ray is imported when a cluster starts, after its environment is set: cluster.py.

AHEAD = 37
"""Offset between the kinds of consecutive callers, so that they do not send the same in step."""
APART = 2**40
"""Distance between the picture numbers of two callers, so that they never send the same picture."""

Labels = frozenset[tuple[str, str]]
Samples = dict[tuple[str, Labels], float]
Encode = Callable[[list[bytes]], Awaitable[tuple[float, int]]]
"""Sends one request. Returns the seconds of decoding, waiting for the device and encoding (the
longest of each over the items) and the bytes of embeddings, whether sent back or left in shared
memory. Raises ServiceError."""


@dataclass(frozen=True, slots=True)
class Load:
    """How much is sent. Ends after `requests` or `seconds`, whichever comes first."""

    concurrency: int
    requests: int
    seconds: float
    protocol: Protocol = "http"
    dtype: Dtype = "bfloat16"
    """Of the embeddings."""
    timeout_seconds: float = 120
    """Per request."""
    per_second: float | None = None
    """Requests arrive at random times, at this rate on average; `concurrency` does not apply."""
    seed: int = 0
    """Seeds these times."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A request that was answered without an error."""

    latency_seconds: float
    overhead_seconds: float
    """The latency minus the longest decoding, waiting for the device and encoding of its images.
    Negative if these are of different images and overlap."""
    images: int
    sent_bytes: int
    embedding_bytes: int


@dataclass(frozen=True, slots=True)
class Result:
    answered: list[Answered] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    wall_seconds: float = 0

    def percentiles_ms(self, *percents: float) -> list[float]:
        """Percentiles of the latencies. Raises RuntimeError if no request was answered."""
        if not self.answered:
            raise RuntimeError(f"nothing was answered: {dict(self.errors)}")
        latencies = [one.latency_seconds * 1e3 for one in self.answered]
        return list(map(float, np.percentile(latencies, percents)))

    def total(self, name: str) -> int:
        return sum(getattr(one, name) for one in self.answered)


def over_wire(transport: Transport, protocol: Protocol, dtype: Dtype) -> Encode:
    reference = protocol in ("reference", "grpc_reference")
    options = {"dtype": dtype} | ({"reference": True} if reference else {})
    call = transport.encode
    if protocol == "grpc" and isinstance(transport, GrpcTransport):
        call = transport.encode_at_once
    if protocol in ("direct", "grpc_direct"):
        call = DirectRows(transport).encode

    async def encode(images: list[bytes]) -> tuple[float, int]:
        items = [RequestItem("image", image) for image in images]
        document = await call(items, options)
        sizes = (math.prod(one["shape"]) * DTYPE_BYTES[one["dtype"]] for one in document["items"])
        return work_seconds(document["timings"]), sum(sizes)

    return encode


def by_handle(options: ServiceOptions, dtype: Dtype, timeout_seconds: float) -> Encode:
    """Reads image headers and calls the Router deployment. Large embeddings are in Ray's shared
    memory and are not read."""
    from ray import serve

    router = serve.get_deployment_handle("Router", APPLICATION)
    spec = read(options.model)

    async def encode(images: list[bytes]) -> tuple[float, int]:
        media = [probe(image, "image", spec, options.limits) for image in images]
        found: list[Embedding] = []
        try:
            for answer in await router.encode.remote(media, dtype, timeout_seconds):
                if not isinstance(answer, Embedding):
                    raise answer
                found.append(answer)
        except Exception as error:  # becomes what a client would have got over HTTP
            problem = fault(error, "of the benchmark")
            raise ServiceError(problem.row.type, problem.message) from error
        return work_seconds(timings(found)), sum(one.size_bytes for one in found)

    return encode


def work_seconds(timings: dict[str, Any]) -> float:
    stages = ("queue_ms", "preprocess_ms", "encode_ms")
    return float(sum(timings[stage] for stage in stages)) / 1e3


async def send(encode: Encode, load: Load, requests: Iterator[list[bytes]]) -> Result:
    answered: list[Answered] = []
    errors: Counter[str] = Counter()
    started = time.perf_counter()
    end = started + load.seconds
    left = load.requests

    async def one(images: list[bytes], since: float) -> None:
        """Sends one request, due at `since`."""
        try:
            work_seconds, embedding_bytes = await encode(images)
        except ServiceError as error:
            errors[error.type] += 1
            return
        taken = time.perf_counter() - since
        sent_bytes = sum(map(len, images))
        answered.append(
            Answered(taken, taken - work_seconds, len(images), sent_bytes, embedding_bytes)
        )

    async def worker() -> None:
        nonlocal left
        while left > 0 and time.perf_counter() < end:
            left -= 1
            await one(next(requests), time.perf_counter())

    async def arrivals(per_second: float) -> None:
        random, due = Random(load.seed), time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(left):
                due += random.expovariate(per_second)
                if due >= end:
                    break
                images = next(requests)
                await asyncio.sleep(due - time.perf_counter())
                group.create_task(one(images, due))

    if load.per_second:
        await arrivals(load.per_second)
    else:
        await asyncio.gather(*(worker() for _ in range(load.concurrency)))
    return Result(answered, errors, time.perf_counter() - started)


def merged(results: Sequence[Result]) -> Result:
    """The result of callers that ran at the same time."""
    return Result(
        list(chain.from_iterable(one.answered for one in results)),
        sum((one.errors for one in results), Counter()),
        max(one.wall_seconds for one in results),
    )


class CallerProcess:
    def __init__(self, place: int, options: ServiceOptions, where: Cluster) -> None:
        self.place = place
        self.options = options
        self.where = where

    async def send(self, load: Load, kinds: list[list[Shape]], turn: int) -> Result:
        """Sends its part of the load. `turn` is different in every call to this process."""
        pictures = pictures_of(kinds, self.place, turn)
        if load.protocol == "handle":
            handle = by_handle(self.options, load.dtype, load.timeout_seconds)
            return await send(handle, load, pictures)
        url = self.where.grpc if load.protocol.startswith("grpc") else self.where.http
        transport = connect(url, None, load.timeout_seconds)
        try:
            return await send(over_wire(transport, load.protocol, load.dtype), load, pictures)
        finally:
            await transport.close()


class Callers:
    def __init__(self, count: int, options: ServiceOptions, where: Cluster) -> None:
        import ray

        # No CPUs reserved: the service's replicas must find theirs.
        actor: Any = ray.remote(num_cpus=0)(CallerProcess)
        self.actors = [actor.remote(place, options, where) for place in range(count)]
        self.turns = 0

    def send(self, load: Load, kinds: list[list[Shape]]) -> Result:
        """Divides the load over the callers; a load with concurrency 1 goes to one caller."""
        import ray

        self.turns += 1
        parts = shares(load, len(self.actors))
        calls = [
            actor.send.remote(part, kinds, self.turns)
            for actor, part in zip(self.actors, parts, strict=False)
        ]
        return merged(ray.get(calls))

    def first(self, load: Load, kinds: list[list[Shape]]) -> list[list[Shape]]:
        """The kinds of the first requests of a load, caller by caller."""
        return [
            kind
            for place, one in enumerate(shares(load, len(self.actors)))
            for kind in islice(cycle(turned(kinds, place)), one.requests)
        ]

    def close(self) -> None:
        import ray

        for actor in self.actors:
            ray.kill(actor)


def shares(load: Load, callers: int) -> list[Load]:
    """Divides the load into one part for each caller that has a share of the concurrency."""
    callers = min(callers, load.concurrency)
    return [
        replace(
            load,
            concurrency=part(load.concurrency, place, callers),
            requests=part(load.requests, place, callers),
            per_second=load.per_second and load.per_second / callers,
            seed=load.seed + place,
        )
        for place in range(callers)
    ]


def part(whole: int, place: int, parts: int) -> int:
    """One of `parts` parts of a whole that differ by at most 1."""
    return whole // parts + (place < whole % parts)


def pictures_of(kinds: list[list[Shape]], place: int, turn: int) -> Iterator[list[bytes]]:
    """Requests that neither another caller nor another turn of this one sends."""
    return requests(turned(kinds, place), (place * 2**10 + turn) * APART)


def turned(kinds: list[list[Shape]], place: int) -> list[list[Shape]]:
    first = place * AHEAD % len(kinds)
    return kinds[first:] + kinds[:first]


@dataclass(frozen=True, slots=True)
class WorkDone:
    """The work of all replicas between two scrapes."""

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
        return balance(self.replica_patches.values())


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


def balance(patches: Collection[float]) -> float:
    """Patches of the busiest replica over the mean; 1 is even."""
    return ratio(max(patches, default=0) * len(patches), sum(patches))


def ratio(part: float, whole: float) -> float:
    """0 if both are 0."""
    return part / whole if whole else 0.0
