"""Processes that call the service in parallel: one Python process sends less than a GPU encodes.

A caller over HTTP or gRPC is an ordinary client. A caller by handle is a process inside Ray, like a
language model: it reads image headers, calls the Router deployment and gets references.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from actors.families.registry import read
from actors.spec.model_spec import ModelSpec
from actors.types import Embedding, SharedBytes
from encoder_service.api.answer import timings
from encoder_service.api.errors import fault
from encoder_service.bench.cluster import APPLICATION, Cluster
from encoder_service.bench.load import Answered, OverWire, Result, Way, merged, send, work_seconds
from encoder_service.bench.mix import Load, Shape, requests
from encoder_service.client.items import ServiceError
from encoder_service.client.transports import connect
from encoder_service.config import LimitOptions, ServiceOptions
from encoder_service.intake.media import probe

AHEAD = 37
"""Offset in kinds from one caller to the next, so that they do not send the same in step."""
APART = 2**40
"""Between the picture numbers of two callers, so that no two send the same picture."""


class ByHandle:
    """Calls the Router deployment; embeddings stay in shared memory."""

    def __init__(
        self, router: DeploymentHandle, spec: ModelSpec, limits: LimitOptions, load: Load
    ) -> None:
        self.router = router
        self.spec = spec
        self.limits = limits
        self.load = load

    async def encode(self, images: list[bytes]) -> Answered:
        media = [probe(image, "image", self.spec, self.limits) for image in images]
        try:
            answers = await self.router.encode.remote(media, "bfloat16", self.load.timeout_seconds)
        except Exception as error:
            raise as_client_error(error) from error
        found = [answer for answer in answers if isinstance(answer, Embedding)]
        if len(found) < len(answers):
            raise as_client_error(next(one for one in answers if not isinstance(one, Embedding)))
        return Answered(work_seconds(timings(found)), sum(map(size_bytes, found)))

    async def close(self) -> None:
        """Nothing to close."""


class CallerProcess:
    def __init__(self, place: int, options: ServiceOptions, where: Cluster) -> None:
        self.place = place
        self.options = options
        self.where = where

    async def send(self, load: Load, kinds: list[list[Shape]], turn: int) -> Result:
        """Sends its part of the load. `turn` is different in every call to this process."""
        pictures = pictures_of(kinds, self.place, turn)
        return await send(self.way(load), load, pictures)

    def way(self, load: Load) -> Way:
        if load.protocol == "handle":
            router = serve.get_deployment_handle("Router", APPLICATION)
            return ByHandle(router, read(self.options.model), self.options.limits, load)
        url = self.where.grpc if load.protocol == "grpc" else self.where.http
        return OverWire(connect(url, None, load.timeout_seconds), load)


class Callers:
    def __init__(self, count: int, options: ServiceOptions, where: Cluster) -> None:
        # No CPUs reserved: the service's replicas must find theirs.
        actor: Any = ray.remote(num_cpus=0)(CallerProcess)
        self.actors = [actor.remote(place, options, where) for place in range(count)]
        self.turns = 0

    def send(self, load: Load, kinds: list[list[Shape]]) -> Result:
        """Divides the load over the callers; a load with concurrency 1 goes to one caller."""
        self.turns += 1
        parts = shares(load, len(self.actors))
        calls = [
            actor.send.remote(part, kinds, self.turns)
            for actor, part in zip(self.actors, parts, strict=False)
        ]
        results: list[Result] = ray.get(calls)
        return merged(results)

    def first(self, load: Load, kinds: list[list[Shape]]) -> list[list[Shape]]:
        """The kinds of the first requests of a load, caller by caller."""
        return [
            kind
            for place, one in enumerate(shares(load, len(self.actors)))
            for kind in islice(cycle(turned(kinds, place)), one.requests)
        ]

    def close(self) -> None:
        for actor in self.actors:
            ray.kill(actor)


def shares(load: Load, callers: int) -> list[Load]:
    """The load in parts, one for each caller that has a share of the concurrency."""
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
    """One of `parts` parts of a whole, which differ by at most 1."""
    return whole // parts + (place < whole % parts)


def pictures_of(kinds: list[list[Shape]], place: int, turn: int) -> Iterator[list[bytes]]:
    """Requests that no other caller sends, nor this one in another turn."""
    return requests(turned(kinds, place), (place * 2**10 + turn) * APART)


def turned(kinds: list[list[Shape]], place: int) -> list[list[Shape]]:
    first = place * AHEAD % len(kinds)
    return kinds[first:] + kinds[:first]


def size_bytes(embedding: Embedding) -> int:
    data = embedding.data
    return data.size_bytes if isinstance(data, SharedBytes) else data.nbytes


def as_client_error(error: Exception) -> ServiceError:
    """The error that a client would have got over HTTP."""
    problem = fault(error, "of the benchmark")
    return ServiceError(problem.row.type, problem.message)
