"""Streams of small answers, which go over Serve's gRPC, as chats do."""

from __future__ import annotations

from collections.abc import AsyncIterator

from ray import serve
from ray.serve.handle import DeploymentHandle

from encoder_service.app import WHOLE_MESSAGES
from router.replicas.pinned import by_value
from tests.serve.conftest import Cluster

PLACE = {"num_cpus": 0, "runtime_env": {"env_vars": WHOLE_MESSAGES}}
LARGE_BYTES = 5_000_000  # above Serve's own limit


class Echo:
    async def twice(self, data: bytes) -> AsyncIterator[bytes]:
        yield data
        yield data


class Asker:
    def __init__(self, echo: DeploymentHandle) -> None:
        self.calls = by_value(echo, "twice")

    async def ask(self, data: bytes) -> list[bool]:
        return [one == data async for one in self.calls.remote(data)]


def test_messages_of_any_size(cluster: Cluster) -> None:
    echo = serve.deployment(Echo, ray_actor_options=PLACE).bind()
    app = serve.deployment(Asker, ray_actor_options=PLACE).bind(echo)
    asker = serve.run(app, name="by-value", route_prefix=None)
    for size_bytes in (10, LARGE_BYTES):
        data = bytes(size_bytes)
        assert asker.ask.remote(data).result(timeout_s=60) == [True, True]
    serve.delete("by-value")
