"""The hooks of Ray that calls to a named replica rest on."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from ray.serve._private.common import DeploymentID, ReplicaID, RequestMetadata
from ray.serve._private.replica_result import ReplicaResult
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentBroadcastResponse, DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from router.replicas import pinned
from router.replicas.fleet import PUBLISHED, PinnedReplicaUnavailable, Replica
from router.replicas.pinned import PinnedRequestRouter, ask_all


def test_ray_has_the_hooks() -> None:
    assert issubclass(PinnedRequestRouter, RequestRouter)
    for name in vars(PinnedRequestRouter).keys() & vars(RequestRouter).keys() - {"__module__"}:
        ours = getattr(PinnedRequestRouter, name)
        theirs = getattr(RequestRouter, name)
        if inspect.isfunction(theirs):
            assert list(inspect.signature(ours).parameters) == list(
                inspect.signature(theirs).parameters
            ), name
    assert inspect.iscoroutinefunction(RequestRouter._choose_replica_for_request)
    assert {
        "initialize_state",
        "update_replicas",
        "on_replica_actor_died",
        "_choose_replica_for_request",
    } <= vars(RequestRouter).keys()


def test_ray_has_the_fields() -> None:
    assert "_by_reference" in inspect.signature(DeploymentHandle.options).parameters
    source = inspect.getsource(RequestRouter)
    assert "self._replicas" in source
    assert "self._deployment_id" in source
    assert "session_id" in inspect.signature(RequestMetadata).parameters
    assert "metadata" in inspect.signature(PendingRequest).parameters
    assert isinstance(RunningReplica.routing_stats, property)
    assert isinstance(RunningReplica.replica_metadata, property)
    assert inspect.iscoroutinefunction(DeploymentBroadcastResponse._fetch_replica_results_async)
    assert list(inspect.signature(ReplicaResult.add_done_callback).parameters)[1:] == ["callback"]


def test_serve_finds_the_class_by_its_name_and_pickles_it() -> None:
    config = RequestRouterConfig(request_router_class="router.replicas.pinned:PinnedRequestRouter")
    assert config.get_request_router_class().__name__ == "PinnedRequestRouter"


def test_the_refusal_pickles() -> None:
    error = pickle.loads(pickle.dumps(PinnedReplicaUnavailable("replica x is gone")))
    assert isinstance(error, PinnedReplicaUnavailable)
    assert str(error) == "replica x is gone"


def test_it_publishes_the_replicas_in_the_order_of_their_ids() -> None:
    deployment = DeploymentID("Encoder", "app")
    request_router = object.__new__(PinnedRequestRouter)
    request_router._deployment_id = deployment
    request_router._replicas = {
        ReplicaID(name, deployment): SimpleNamespace(
            replica_metadata={}, routing_stats={"outstanding_patches": patches}
        )
        for name, patches in (("b", 1), ("a", 2))
    }
    request_router._publish()
    first = PUBLISHED["app", "Encoder"]
    assert list(first.items()) == [("a", Replica({}, 2)), ("b", Replica({}, 1))]
    request_router._publish()
    assert PUBLISHED["app", "Encoder"] is not first


class Late:
    """A call whose answer nobody waits for any more when it comes."""

    callbacks: ClassVar[list[Callable[[Any], None]]] = []  # outside the call, as Ray keeps them

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.callbacks.append(callback)

    async def get_async(self) -> None:
        await asyncio.sleep(60)

    def cancel(self) -> None:
        pass


def test_a_late_answer_is_held_until_its_callbacks_have_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray aborts the process if a callback runs for a long answer whose reference is gone."""
    monkeypatch.setattr(pinned, "ASK_SECONDS", 0.1)
    calls = [Late()]
    call = weakref.ref(calls[0])

    async def fetched() -> list[Late]:
        return [calls.pop()]

    handle: Any = SimpleNamespace(
        broadcast=lambda method: SimpleNamespace(_fetch_replica_results_async=fetched)
    )
    assert asyncio.run(ask_all(handle, "scrape")) == [None]
    assert call() is not None
    Late.callbacks.pop()(None)
    assert call() is None
