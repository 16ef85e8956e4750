"""Encoders that Serve removes still answer the requests that they have."""

from __future__ import annotations

import asyncio

import pytest
from ray import serve

from actors.types import Embedding
from router.options import RouterOptions
from router.replicas.pinned import ask_all
from router.router import Router
from tests.serve.stand_in import encoders, item, right

SLOW = 200_000
"""Patches that take two seconds."""


@pytest.mark.usefixtures("cluster")
def test_a_call_outlasts_its_encoders_deployment() -> None:
    handle = serve.run(encoders(1), name="drained", route_prefix=None)

    async def outlast() -> None:
        router = Router([handle], RouterOptions(replica_wait_seconds=0.5))
        quick, slow = [item(1, 4)], [item(2, SLOW)]
        assert right(quick, await router.encode(quick, timeout_seconds=10))
        (replica,) = (await router.status()).replicas
        call = asyncio.create_task(router.encode(slow, timeout_seconds=20))
        await asyncio.sleep(0.3)
        deleting = asyncio.create_task(asyncio.to_thread(serve.delete, "drained"))
        await asyncio.sleep(1)  # until the router learns that no encoder is left
        assert not (await router.status()).replicas
        assert not call.done()
        answers = await call
        assert right(slow, answers)
        assert [one.replica for one in answers if isinstance(one, Embedding)] == [replica.replica]
        await deleting

    asyncio.run(outlast())
    assert asyncio.run(ask_all(handle, "scrape")) == [None], "it is missing, and breaks nothing"
