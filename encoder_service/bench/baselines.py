"""Baselines of `bench serve`: the engines without the service, and Ray Serve without work."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response

from actors.options import ActorOptions
from encoder_service.bench.mix import Shape, requests
from encoder_service.config import ServiceOptions

if TYPE_CHECKING:
    from encoder_service.bench.engine.pipeline import EngineRates

MOST_SECONDS = 5.0
"""Of each of the two measurements of the engines."""
REQUESTS_PER_KIND, MOST_REQUESTS = 8, 64
"""Sent to the engines over and over again: nothing caches them."""
NOOP_WARM_UPS = 5
ACTOR = {"num_cpus": 0.1}


class EngineAlone:
    """One engine in a process of its own, which frees the device for the service when it ends."""

    def measure(
        self, options: ActorOptions, pictures: list[bytes], in_flight: int, seconds: float
    ) -> EngineRates:
        from encoder_service.bench.engine.pipeline import measure  # imports torch

        return measure(options, pictures, in_flight, seconds)


def measure_alone(
    options: ServiceOptions, kinds: list[list[Shape]], concurrency: int, seconds: float
) -> dict[str, float]:
    """Images per second of as many engines as the service has, with and without decoding."""
    different = min(REQUESTS_PER_KIND * len(kinds), MOST_REQUESTS)
    sent = [image for one in islice(requests(kinds), different) for image in one]
    images_per_request = len(sent) / different
    replicas = options.encoder.least_replicas
    in_flight = max(1, round(concurrency * images_per_request / replicas))
    actor = ActorOptions(**{name: getattr(options, name) for name in ActorOptions.model_fields})
    engine: Any = ray.remote(num_cpus=0, num_gpus=options.encoder.num_gpus)(EngineAlone)
    engines = [engine.remote() for _ in range(replicas)]
    part = min(seconds, MOST_SECONDS)
    try:
        found: list[EngineRates] = ray.get(
            [one.measure.remote(actor, sent, in_flight, part) for one in engines]
        )
    finally:
        for one in engines:
            ray.kill(one)
    return {
        "engine_images_per_second": sum(one.engine for one in found),
        "pipeline_images_per_second": sum(one.pipeline for one in found),
    }


class Leaf:
    """In place of the encoder."""

    async def call(self, body: bytes, answer_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return np.zeros(answer_bytes, np.uint8)


class Middle:
    """In place of the router."""

    def __init__(self, leaf: DeploymentHandle) -> None:
        self.leaf = leaf

    async def call(self, body: bytes, answer_bytes: int) -> Any:
        return await self.leaf.call.remote(body, answer_bytes)


class Front:
    """In place of the ingress: responds with as many bytes as the query asks for."""

    def __init__(self, middle: DeploymentHandle) -> None:
        self.middle = middle

    async def __call__(self, request: Request) -> Response:
        body = await request.body() if request.method == "POST" else b""
        answer_bytes = int(request.query_params.get("answer_bytes", 0))
        answer = await self.middle.call.remote(body, answer_bytes)
        return Response(answer.tobytes())


@contextmanager
def noop() -> Iterator[None]:
    """An application at `/` with as many hops as the service (HTTP, call, call) and no work."""
    leaf = serve.deployment(Leaf, ray_actor_options=ACTOR).bind()
    middle = serve.deployment(Middle, ray_actor_options=ACTOR).bind(leaf)
    front = serve.deployment(Front, ray_actor_options=ACTOR).bind(middle)
    serve.run(front, name="noop", route_prefix="/")
    try:
        yield
    finally:
        serve.delete("noop")


def measure_noop(
    url: str, body: bytes, answer_bytes: int, requests: int, timeout_seconds: float
) -> list[float]:
    """Seconds of each of these requests, sent one after another. Without a body they are GETs."""
    method, params = "POST" if body else "GET", {"answer_bytes": answer_bytes}
    with httpx.Client(timeout=timeout_seconds) as client:
        taken = []
        for _ in range(NOOP_WARM_UPS + requests):
            started = time.perf_counter()
            client.request(method, url, params=params, content=body).raise_for_status()
            taken.append(time.perf_counter() - started)
    return taken[NOOP_WARM_UPS:]
