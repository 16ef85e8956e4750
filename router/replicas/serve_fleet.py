"""The replicas of a deployment, reached through Ray: fleet.Fleet and references.Keepers.

Knows handles, replicas and Ray's exceptions, not how items are planned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ray import serve
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle

from actors.errors import EmbeddingLost, ServiceError
from actors.line_messages import Call
from actors.store.references import Kept
from actors.telemetry.request_context import ORIGIN
from actors.telemetry.tracing import Spans
from actors.types import Answer, Dtype, Embedding, Media, Reply
from router.replicas.direct import DirectCall
from router.replicas.fleet import ReplicaDied, ReplicaFull, ShardLost
from router.replicas.line import Lines, fits
from router.replicas.pinned import PIN
from router.replicas.registry import REGISTRY, PinnedReplicaFull, PinnedReplicaUnavailable, Replica

LOST = (
    RayActorError,
    ObjectLostError,
    TaskCancelledError,
    DeploymentUnavailableError,
    PinnedReplicaUnavailable,
)
"""The replica is at fault, not the items. A subclass of RayActorError each: died, unavailable."""

ANYWHERE = "any"
"""The one replica of Serve's local testing mode, which has no request routers."""


class ServeFleet:
    """The replicas of a deployment, reached through its handle (fleet.Fleet)."""

    def __init__(
        self, encoder: DeploymentHandle, fingerprint: str | None, spans: Spans | None = None
    ) -> None:
        self._spans = spans or Spans()
        self._deployment = (encoder.app_name, encoder.deployment_name)
        self._fingerprint = fingerprint
        # `options` starts the handle's request router, which fills the registry.
        self._handle = encoder.options(method_name="encode", _by_reference=True)
        self._pinned: dict[str, Any] = {}
        self._lines = Lines()
        self._local = is_local_testing()

    def replicas(self) -> Mapping[str, Replica]:
        """All that are running and have our model, in the order of their ids."""
        return self._fleet()[1]

    def reports(self) -> tuple[int, Mapping[str, int]]:
        """See fleet.Fleet."""
        version, replicas = self._fleet()
        for gone in self._pinned.keys() - replicas.keys():
            del self._pinned[gone]
        self._lines.keep(replicas)
        return version, {name: replica.outstanding_patches for name, replica in replicas.items()}

    async def encode(
        self,
        replica: str,
        media: list[Media],
        dtype: Dtype,
        timeout_seconds: float,
        *,
        keep: bool = False,
        careful: bool = False,
    ) -> Reply:
        """See fleet.Fleet. Cancelling it cancels the call."""
        patches = sum(item.plan.patches for item in media)
        with self._spans.span(
            "route", "client", replica=replica, items=len(media), patches=patches
        ):
            call = Call(media, dtype, timeout_seconds, ORIGIN.get(), keep)
            reply: Reply = await self._told(self._encode(replica, call, careful=careful))
            return reply

    async def ask(self, replica: str) -> None:
        """See fleet.Fleet."""
        with suppress(ReplicaFull):
            await self._told(self._call(replica, "check_health", careful=True))

    async def keep_again(self, answer: Embedding, count: int) -> list[Answer]:
        """See fleet.Fleet."""
        call = self._call(answer.replica, "keep_again", answer.reference, count)
        references: list[str] = await self._told(call)
        found: list[Answer] = [replace(answer, reference=one) for one in references]
        gone = f"encoded, but no longer kept by replica {answer.replica}: try again"
        return found + [EmbeddingLost(gone)] * (count - len(found))

    async def fetch(self, replica: str, name: str) -> Kept | None:
        """See references.Keepers."""
        kept: Kept | None = await self._told(self._call(replica, "fetch", name))
        return kept

    async def release(self, replica: str, name: str) -> bool:
        """See references.Keepers."""
        there: bool = await self._told(self._call(replica, "release", name))
        return there

    async def _told(self, response: Any) -> Any:
        """What a call gives, or its failure in our words."""
        try:
            return await response
        except PinnedReplicaFull as error:
            raise ReplicaFull(brief(error)) from error
        except RayActorError as error:
            raise ReplicaDied(brief(error)) from error
        except LOST as error:
            raise ShardLost(brief(error)) from error
        except RayTaskError as error:
            if isinstance(error.cause, LOST):
                raise ShardLost(brief(error.cause)) from error
            if isinstance(error.cause, ServiceError):
                raise error.cause from None
            raise
        except asyncio.CancelledError:
            response.cancel()
            raise

    def _fleet(self) -> tuple[int, Mapping[str, Replica]]:
        if self._local:
            return 0, {ANYWHERE: Replica({}, 0)}
        fleet = REGISTRY.fleet(self._deployment)
        return fleet.version, {
            name: replica for name, replica in fleet.replicas.items() if self._is_ours(replica)
        }

    def _is_ours(self, replica: Replica) -> bool:
        """Calls go by the deployment's name: in a rollout its replicas have two models."""
        fingerprint = replica.metadata.get("fingerprint")
        return None in (self._fingerprint, fingerprint) or fingerprint == self._fingerprint

    def _encode(self, replica: str, call: Call, *, careful: bool) -> Any:
        """Over a line where that can be."""
        there = None if careful else self._there(replica)
        if there and fits(call, there.metadata):
            line = self._lines.to(replica, there.metadata)
            if line:
                return line.call(call)
        return self._call(replica, "encode", *call.arguments, careful=careful)

    def _there(self, replica: str) -> Replica | None:
        return REGISTRY.fleet(self._deployment).replicas.get(replica)

    def _call(self, replica: str, method: str, *arguments: Any, careful: bool = False) -> Any:
        """Directly where that can be: to a replica that is gone its handle says so."""
        there = None if careful else self._there(replica)
        if there and there.actor:
            return DirectCall(there, method, *arguments)
        return getattr(self._to(replica), method).remote(*arguments)

    def _to(self, replica: str) -> Any:
        if self._local:
            return self._handle
        if replica not in self._pinned:
            self._pinned[replica] = self._handle.options(session_id=PIN + replica)
        return self._pinned[replica]


def is_local_testing() -> bool:
    """Whether this is Serve's local testing mode: no replica, no request routers."""
    try:
        serve.get_replica_context()
    except RayServeException:
        return True
    return False


def brief(error: Exception) -> str:
    """One line: Ray's messages fill a page."""
    return (str(error).strip().splitlines() or [""])[0] or type(error).__name__
