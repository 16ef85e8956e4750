"""Serve's local testing mode, which has neither replicas nor request routers: calls go anywhere."""

from __future__ import annotations

from ray import serve

from actors.telemetry.tracing import Origin
from actors.types import Dtype, Media, Reply
from router.options import RouterOptions
from router.router import Router
from tests.unit.fleet import embedding, item, right


class LocalEncoder:
    async def encode(
        self, media: list[Media], dtype: Dtype, timeout_seconds: float, origin: Origin, keep: bool
    ) -> Reply:
        return Reply([embedding(one, "local") for one in media], 0)


def test_a_router_works_without_a_cluster() -> None:
    encoder = serve.deployment(LocalEncoder, name="Encoder").bind()
    app = serve.deployment(Router, name="Router").bind(encoder, RouterOptions())
    router = serve.run(app, _local_testing_mode=True)
    media = [item(number) for number in range(3)]
    assert right(media, router.encode.remote(media, "bfloat16", 5.0).result(timeout_s=5))
    assert router.status.remote().result(timeout_s=5).ready
