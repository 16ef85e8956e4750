"""The Router deployment: Ray's side of dispatch.py.

One process plans for all requests that reach it; several routers converge by what replicas report.
Knows handles, replicas and Ray's exceptions, not how items are planned.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from random import Random
from typing import Any

from ray import serve
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle

from actors.errors import ServiceError
from actors.logs import name_requests
from actors.mirror import start_mirror
from actors.options import MetricsOptions, TracingOptions
from actors.origin import ORIGIN, Origin
from actors.references import Kept
from actors.tracing import NoSpans, Spans, open_spans
from actors.types import Answer, Dtype, Media, Reply
from router.balance import POLICIES
from router.dispatch import Dispatcher, now
from router.fleet import ReplicaDied, ReplicaFull, ShardLost
from router.metrics import RouterMetrics
from router.options import RouterOptions
from router.pinned import PIN
from router.references import Keeping
from router.registry import REGISTRY, PinnedReplicaFull, PinnedReplicaUnavailable, Replica

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


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One encoder replica, as this router knows it."""

    replica: str
    metadata: Mapping[str, Any]
    """What it said about itself when it became ready."""
    own_patches: int
    """Outstanding ones that this router sent."""
    reported_patches: int
    """Outstanding ones of all routers, about a second old."""
    excluded: bool
    """It failed lately and gets nothing new."""


@dataclass(frozen=True, slots=True)
class RouterStatus:
    """What this router can do now."""

    ready: bool
    """There is a replica; replicas exist for Serve once everything is captured."""
    replicas: tuple[ReplicaStatus, ...]
    outstanding_patches: int


class ServeFleet:
    """The replicas of a deployment, reached through its handle (fleet.Fleet)."""

    def __init__(
        self, encoder: DeploymentHandle, fingerprint: str | None, spans: Spans | None = None
    ) -> None:
        self._spans = spans or NoSpans()
        self._deployment = (encoder.app_name, encoder.deployment_name)
        self._fingerprint = fingerprint
        # `options` starts the handle's request router, which fills the registry.
        self._handle = encoder.options(method_name="encode", _by_reference=True)
        self._pinned: dict[str, Any] = {}
        self._local = is_local_testing()

    def replicas(self) -> Mapping[str, Replica]:
        """All that are running and have our model, in the order of their ids."""
        return self._fleet()[1]

    def reports(self) -> tuple[int, Mapping[str, int]]:
        """See fleet.Fleet."""
        version, replicas = self._fleet()
        for gone in self._pinned.keys() - replicas.keys():
            del self._pinned[gone]
        return version, {name: replica.outstanding_patches for name, replica in replicas.items()}

    async def encode(
        self, replica: str, media: list[Media], dtype: Dtype, timeout_seconds: float
    ) -> Reply:
        """See fleet.Fleet. Cancelling it cancels the call."""
        patches = sum(item.plan.patches for item in media)
        with self._spans.span(
            "route", "client", replica=replica, items=len(media), patches=patches
        ):
            call = self._to(replica).remote(media, dtype, timeout_seconds, ORIGIN.get())
            reply: Reply = await self._told(call)
            return reply

    async def ask(self, replica: str) -> None:
        """See fleet.Fleet."""
        with suppress(ReplicaFull):
            await self._told(self._to(replica).check_health.remote())

    async def keep(self, replica: str, kept: list[Kept]) -> list[str]:
        """See references.Keepers."""
        names: list[str] = await self._told(self._to(replica).keep.remote(kept))
        return names

    async def fetch(self, replica: str, name: str) -> Kept | None:
        """See references.Keepers."""
        kept: Kept | None = await self._told(self._to(replica).fetch.remote(name))
        return kept

    async def release(self, replica: str, name: str) -> bool:
        """See references.Keepers."""
        there: bool = await self._told(self._to(replica).release.remote(name))
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

    def _to(self, replica: str) -> Any:
        if self._local:
            return self._handle
        if replica not in self._pinned:
            self._pinned[replica] = self._handle.options(session_id=PIN + replica)
        return self._pinned[replica]


class Router:
    """Serve deployment. app.py sets replicas and resources; `encoder` has the pinned router."""

    def __init__(
        self,
        encoder: DeploymentHandle,
        options: RouterOptions,
        fingerprint: str | None = None,
        tracing: TracingOptions = TracingOptions(),  # noqa: B008, frozen
        cache_max_bytes: int = 0,
        metrics: MetricsOptions | None = None,
    ) -> None:
        """`fingerprint`: only replicas that say the same of themselves are used, or nothing.

        `cache_max_bytes`: of each replica's cache. `metrics`: of a router that is a deployment.
        """
        name_requests()
        self._fleet = ServeFleet(encoder, fingerprint, open_spans(tracing, "router"))
        self._keeping = Keeping(self._fleet)
        self._metrics = RouterMetrics()
        plan = POLICIES[options.policy](Random())
        self._dispatcher = Dispatcher(self._fleet, options, plan, self._metrics, cache_max_bytes)
        if metrics and not is_local_testing():
            start_mirror(metrics, self.metrics)

    async def encode(
        self,
        media: list[Media],
        dtype: Dtype = "bfloat16",
        timeout_seconds: float = 60,
        origin: Origin | None = None,
    ) -> list[Answer]:
        """The answers in the order of `media`; items that fail are answered with their error.

        Embeddings above a megabyte are references to shared memory, which here.py reads.
        `origin`: whose work it is, where the caller is another process. Raises
        Overloaded, TooLarge or Unavailable when the request as a whole is refused.
        """
        if origin is not None:
            ORIGIN.set(origin)
        answers: dict[int, Answer] = {}
        async with aclosing(self._dispatcher.answers(media, dtype, timeout_seconds)) as stream:
            async for position, answer in stream:
                answers[position] = answer
        return [answers[position] for position in range(len(media))]

    async def encode_stream(
        self, media: list[Media], dtype: Dtype = "bfloat16", timeout_seconds: float = 60
    ) -> AsyncGenerator[tuple[int, Answer]]:
        """(Position, answer) of every item, as they come. Raises as `encode` does."""
        answers = self._dispatcher.answers(media, dtype, timeout_seconds, singly=True)
        async with aclosing(answers):
            async for position, answer in answers:
                yield position, answer

    def check_room(self) -> None:
        """Raises Overloaded where `encode` would, whatever it is given. Costs next to nothing."""
        self._dispatcher.check_room()

    async def keep(self, media: list[Media], answers: list[Answer]) -> list[Answer]:
        """Has embeddings kept by their replicas for a while: `reference` is the id of each."""
        return await self._keeping.keep(media, answers)

    async def fetch(self, reference: str) -> Kept:
        """What is kept under an id. Raises NotFound, or Unavailable for now."""
        return await self._keeping.fetch(reference)

    async def release(self, reference: str) -> None:
        """Lets go before the time. Raises NotFound, or Unavailable for now."""
        await self._keeping.release(reference)

    async def status(self) -> RouterStatus:
        """What is there, and what it carries."""
        self._dispatcher.refresh()
        ledger = self._dispatcher.ledger
        replicas = tuple(
            ReplicaStatus(
                replica=name,
                metadata=replica.metadata,
                own_patches=ledger.own(name),
                reported_patches=replica.outstanding_patches,
                excluded=ledger.excluded(name, now()),
            )
            for name, replica in self._fleet.replicas().items()
        )
        return RouterStatus(
            ready=bool(replicas),
            replicas=replicas,
            outstanding_patches=ledger.outstanding,
        )

    def metrics(self) -> str:
        """Prometheus text of this process."""
        ledger = self._dispatcher.ledger
        return self._metrics.render((name, ledger.own(name)) for name in self._fleet.replicas())

    def scrape(self) -> tuple[str, str]:
        """The same with this replica's id: a broadcast does not tell who answers."""
        return serve.get_replica_context().replica_id.unique_id, self.metrics()


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
