"""Calls past Serve's handle: what of Serve they rest on, and what becomes of a dead replica's."""

from __future__ import annotations

import asyncio
import inspect
import pickle
from collections.abc import Awaitable
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve._private.common import RequestMetadata
from ray.serve._private.replica import ReplicaActor
from ray.serve.request_router import RunningReplica

from router.replicas.direct import DirectCall
from router.replicas.registry import Replica


def test_ray_has_what_it_rests_on() -> None:
    assert "self._actor_handle" in inspect.getsource(RunningReplica)
    assert inspect.iscoroutinefunction(ReplicaActor.handle_request)
    first, *_ = list(inspect.signature(ReplicaActor.handle_request).parameters)[1:]
    assert first == "pickled_request_metadata"
    metadata = RequestMetadata("a", "a", call_method="encode")
    protocols = metadata.is_http_request, metadata.is_grpc_request, metadata.is_streaming
    assert not any(protocols)


class Actor:
    """Of a replica: each call comes to `outcome`."""

    def __init__(self, outcome: Awaitable[object]) -> None:
        self.outcome = outcome
        self.calls: list[tuple[str, tuple[object, ...]]] = []
        self.handle_request = SimpleNamespace(remote=self.remote)

    def remote(self, metadata: bytes, *arguments: object) -> Awaitable[object]:
        self.calls.append((pickle.loads(metadata).call_method, arguments))
        return self.outcome


async def gives(outcome: object) -> object:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def test_a_call_says_its_method_and_gives_the_answer() -> None:
    actor = Actor(gives("kept"))

    async def run() -> object:
        return await DirectCall(Replica({}, 0, actor), "fetch", "name")

    assert asyncio.run(run()) == "kept"
    assert actor.calls == [("fetch", ("name",))]


@pytest.mark.parametrize(
    ("failure", "told"), [(ActorDiedError(), 1), (ActorUnavailableError("x", b"x" * 16), 0)]
)
def test_serve_is_told_of_a_replica_that_died(failure: Exception, told: int) -> None:
    deaths: list[None] = []
    replica = Replica({}, 0, Actor(gives(failure)), lambda: deaths.append(None))

    async def run() -> None:
        await DirectCall(replica, "encode")

    with pytest.raises(type(failure)):
        asyncio.run(run())
    assert len(deaths) == told
