"""What the router makes of the replicas that Serve tells it of, and of what Ray raises."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError, TaskCancelledError

from actors.errors import EmbeddingLost, InvalidMedia
from actors.telemetry.request_context import Origin
from actors.types import Answer, Dtype, Embedding, Media
from router.replicas import serve_fleet
from router.replicas.fleet import ReplicaDied, ReplicaFull, ShardLost
from router.replicas.registry import REGISTRY, PinnedReplicaFull, PinnedReplicaUnavailable, Replica
from router.replicas.serve_fleet import ServeFleet
from tests.unit.fleet import embedding, item


class Handle:
    """Of a deployment; calls raise `failure`."""

    app_name = "fleet"
    deployment_name = "Encoder"

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure

    def options(self, **_: str) -> Handle:
        return self

    @property
    def encode(self) -> Handle:
        return self

    async def remote(
        self, media: list[Media], dtype: Dtype, left_seconds: float, origin: Origin, keep: bool
    ) -> list[Answer]:
        if self.failure:
            raise self.failure
        return []


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models in one deployment, as in a rollout, and one that does not say."""
    monkeypatch.setattr(serve_fleet, "is_local_testing", lambda: False)
    said = {"a": {"fingerprint": "old"}, "b": {"fingerprint": "new"}, "c": {}}
    named = {name: Replica(metadata, 7) for name, metadata in said.items()}
    REGISTRY.publish((Handle.app_name, Handle.deployment_name), named)


@pytest.mark.usefixtures("replicas")
@pytest.mark.parametrize(
    ("fingerprint", "names"), [(None, "abc"), ("old", "ac"), ("new", "bc"), ("other", "c")]
)
def test_only_replicas_of_the_own_model_are_planned_for(
    fingerprint: str | None, names: str
) -> None:
    fleet = ServeFleet(Handle(), fingerprint)
    assert fleet.reports()[1] == dict.fromkeys(names, 7)
    assert list(fleet.replicas()) == list(names)


@pytest.mark.usefixtures("replicas")
@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (PinnedReplicaFull("x"), ReplicaFull),
        (PinnedReplicaUnavailable("x"), ShardLost),
        (TaskCancelledError(), ShardLost),
        (ActorDiedError(), ReplicaDied),
        (ActorUnavailableError("x", b"x" * 16), ReplicaDied),
        (RayTaskError("encode", "", ActorDiedError()), ShardLost),
        (RayTaskError("encode", "", InvalidMedia("x")), InvalidMedia),
        (RayTaskError("encode", "", ValueError("x")), RayTaskError),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value.__name__,
)
def test_failures_are_told_apart(failure: Exception, told: type[Exception]) -> None:
    with pytest.raises(Exception) as raised:  # noqa: PT011
        asyncio.run(ServeFleet(Handle(failure), None).encode("a", [], "bfloat16", 5))
    assert type(raised.value) is told


@pytest.mark.usefixtures("replicas")
def test_ids_that_cannot_be_had_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async def given(*_: object, **__: object) -> list[str]:
        return ["a.x"]  # of three: the others found no room

    fleet = ServeFleet(Handle(), None)
    monkeypatch.setattr(fleet, "_call", given)
    kept = replace(embedding(item(1), "a"), reference="a.0")
    first, *others = asyncio.run(fleet.keep_again(kept, 3))
    assert isinstance(first, Embedding)
    assert first.reference == "a.x"
    assert [type(one) for one in others] == [EmbeddingLost] * 2
