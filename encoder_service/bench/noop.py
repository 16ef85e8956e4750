"""A Serve application that does nothing, in as many hops as the service: HTTP -> call -> call.

What Ray Serve itself takes on a machine is the yardstick for what the service adds: once for an
empty exchange, once for one that carries the bytes of an image there and of its embedding back.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response

ACTOR = {"num_cpus": 0.1}


class Leaf:
    """In the place of the encoder."""

    async def call(self, body: bytes, answer_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """So many bytes."""
        return np.zeros(answer_bytes, np.uint8)


class Middle:
    """In the place of the router."""

    def __init__(self, leaf: DeploymentHandle) -> None:
        self.leaf = leaf

    async def call(self, body: bytes, answer_bytes: int) -> Any:
        """What the leaf gives."""
        return await self.leaf.call.remote(body, answer_bytes)


class Front:
    """In the place of the ingress."""

    def __init__(self, middle: DeploymentHandle) -> None:
        self.middle = middle

    async def __call__(self, request: Request) -> Response:
        """As many bytes as the query asks for, from the leaf, through the middle."""
        body = await request.body() if request.method == "POST" else b""
        answer_bytes = int(request.query_params.get("answer_bytes", 0))
        answer = await self.middle.call.remote(body, answer_bytes)
        return Response(answer.tobytes())


@contextmanager
def noop() -> Iterator[None]:
    """The application, at `/`."""
    leaf = serve.deployment(Leaf, ray_actor_options=ACTOR).bind()
    middle = serve.deployment(Middle, ray_actor_options=ACTOR).bind(leaf)
    serve.run(
        serve.deployment(Front, ray_actor_options=ACTOR).bind(middle), name="noop", route_prefix="/"
    )
    try:
        yield
    finally:
        serve.delete("noop")


def measure(
    url: str, body: bytes, answer_bytes: int, requests: int, timeout_seconds: float
) -> list[float]:
    """Seconds of each of so many requests, one after another. No body: a GET."""
    method, params = "POST" if body else "GET", {"answer_bytes": answer_bytes}
    with httpx.Client(timeout=timeout_seconds) as client:
        for _ in range(5):
            client.request(method, url, params=params, content=body).raise_for_status()
        taken = []
        for _ in range(requests):
            started = time.perf_counter()
            client.request(method, url, params=params, content=body).raise_for_status()
            taken.append(time.perf_counter() - started)
    return taken
