"""The encoder replicas of a Serve deployment: gRPC for calls, Ray and Serve for all else.

Serve tells which replicas there are, and is told of those that died. Rows in shared memory are
handed over by a call of Ray, because object references only travel through Ray. Implements
fleet.Fleet and references.Keepers. Does not know how items are planned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from contextvars import Context
from typing import Any

import ray
from ray import serve
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle

from actors.rpc import replica_pb2 as pb
from actors.rpc.codec import EncodeCall, kept_of, message_fields, reply_of
from actors.rpc.server import Endpoint, take
from actors.store.kept import Kept
from actors.telemetry.tracing import ORIGIN, Spans
from actors.types import Dtype, Media, Reply, SharedBytes
from router.replicas.fleet import ReplicaUnreachable, ShardLost
from router.replicas.membership import MEMBERSHIP, PinnedReplicaUnavailable, Replica
from router.replicas.pinned import pinned
from router.replicas.rpc import ReplicaChannels

LOST = (
    RayActorError,
    ObjectLostError,
    TaskCancelledError,
    DeploymentUnavailableError,
    PinnedReplicaUnavailable,
)
"""What Ray raises where the replica is at fault, not the request."""

GRACE_SECONDS = 1.0  # how much longer than its items a call may take as a whole
FETCH_SECONDS = 10.0
"""Time limit of a fetch or a release. A fetch may wait until rows are written to shared memory."""
CONFIRM_SECONDS, CONFIRMATIONS = 0.5, 10
"""Pause between two questions to Serve whether an unreachable replica is dead, and their number."""
SERVE_NAMESPACE = "serve"  # of the actors of Serve's replicas
ANYWHERE = "any"
"""The one replica of Serve's local testing mode, which has neither replicas nor gRPC."""


class ServeFleet:
    """The replicas of one deployment (fleet.Fleet, references.Keepers)."""

    def __init__(
        self, encoder: DeploymentHandle, fingerprint: str | None, spans: Spans | None = None
    ) -> None:
        """`fingerprint`: of the model; replicas of another one are left out, as in a rollout."""
        self._spans = spans or Spans()
        self._deployment = (encoder.app_name, encoder.deployment_name)
        self._fingerprint = fingerprint
        self._local = is_local_testing()
        # `options` starts the handle's request router, which fills the membership.
        self._handle = encoder.options(method_name="encode", _by_reference=True)
        self._channels = ReplicaChannels("" if self._local else node_id())
        self._hand_overs: dict[str, HandOver] = {}
        self._confirming: dict[str, asyncio.Task[None]] = {}

    def replicas(self) -> Mapping[str, Replica]:
        """All that are running and can be used, in the order of their ids."""
        return self._members()[1]

    def reports(self) -> tuple[int, Mapping[str, int]]:
        version, replicas = self._members()
        for gone in self._hand_overs.keys() - replicas.keys():
            del self._hand_overs[gone]
        self._channels.keep(replicas)
        return version, {name: replica.outstanding_patches for name, replica in replicas.items()}

    async def encode(
        self,
        replica: str,
        media: list[Media],
        dtype: Dtype,
        timeout_seconds: float,
        *,
        keep: bool = False,
    ) -> Reply:
        """Cancelling it cancels the call."""
        patches = sum(item.plan.patches for item in media)
        with self._spans.span(
            "route", "client", replica=replica, items=len(media), patches=patches
        ):
            call = EncodeCall(media, dtype, timeout_seconds, ORIGIN.get(), keep)
            if self._local:
                return await self._encode_locally(call)
            request = pb.EncodeRequest(**message_fields(call))
            hand_over = self._hand_over(replica)
            reply = await self._call(replica, "Encode", request, timeout_seconds + GRACE_SECONDS)
            return reply_of(reply, await hand_over.take(reply.ticket))

    async def check(self, replica: str) -> None:
        if not self._local:
            await self._call(replica, "Check", pb.CheckRequest())

    async def fetch(self, replica: str, name: str) -> Kept | None:
        hand_over = self._hand_over(replica)
        reply = await self._call(replica, "Fetch", pb.FetchRequest(name=name), FETCH_SECONDS)
        if not reply.HasField("kept"):
            return None
        return kept_of(reply.kept, await hand_over.take(reply.ticket))

    async def release(self, replica: str, name: str) -> bool:
        request = pb.ReleaseRequest(name=name)
        reply = await self._call(replica, "Release", request, FETCH_SECONDS)
        return bool(reply.released)

    async def _call(
        self, replica: str, method: str, request: Any, timeout_seconds: float | None = None
    ) -> Any:
        channel = self._channels.to(replica, self._endpoint(replica))
        try:
            return await channel.call(method, request, timeout_seconds)
        except ShardLost:
            self._confirm(replica)
            raise

    def _hand_over(self, replica: str) -> HandOver:
        """To be asked for before the call: a draining replica answers, but is no longer listed."""
        if replica not in self._hand_overs:
            self._hand_overs[replica] = HandOver(self._endpoint(replica).actor)
        return self._hand_overs[replica]

    def _endpoint(self, replica: str) -> Endpoint:
        member = self._members()[1].get(replica)
        if member is None or member.endpoint is None:
            raise ReplicaUnreachable(f"replica {replica} is gone")
        return member.endpoint

    def _confirm(self, replica: str) -> None:
        """Asks Serve in the background whether a replica is dead.

        Serve's request router drops it then at once, rather than after the next health check.
        """
        if replica not in self._confirming:
            # A context of its own: in a request's, Serve would cancel the calls with the request.
            task = asyncio.get_running_loop().create_task(
                self._ask_serve(replica), context=Context()
            )
            self._confirming[replica] = task
            task.add_done_callback(lambda _: self._confirming.pop(replica, None))

    async def _ask_serve(self, replica: str) -> None:
        handle = pinned(self._handle, replica)
        for _ in range(CONFIRMATIONS):
            with suppress(*LOST):
                with suppress(RayTaskError):  # unhealthy, but alive
                    await handle.check_health.remote()
                return
            if replica not in self._members()[1]:
                return
            await asyncio.sleep(CONFIRM_SECONDS)

    async def _encode_locally(self, call: EncodeCall) -> Reply:
        response = self._handle.remote(
            call.media, call.dtype, call.timeout_seconds, call.origin, call.keep
        )
        try:
            reply: Reply = await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        return reply

    def _members(self) -> tuple[int, Mapping[str, Replica]]:
        if self._local:
            return 0, {ANYWHERE: Replica({}, 0)}
        members = MEMBERSHIP.members(self._deployment)
        return members.version, {
            name: replica for name, replica in members.replicas.items() if self._is_ours(replica)
        }

    def _is_ours(self, replica: Replica) -> bool:
        """In a rollout a deployment has replicas of two models, or of two protocol versions."""
        fingerprint = replica.metadata.get("fingerprint")
        same = None in (self._fingerprint, fingerprint) or fingerprint == self._fingerprint
        return same and replica.endpoint is not None


class HandOver:
    """Exchanges tickets of one replica for rows in shared memory.

    One call at a time takes all tickets that came meanwhile, because a call of Ray costs
    milliseconds. It is no call of a Serve handle, which streams its answers: object references in a
    stream are sometimes released before a receiver on another node holds them.
    """

    def __init__(self, actor: str) -> None:
        """`actor`: the replica's name."""
        self._actor_name = actor
        self._actor: Any = None
        self._waiting: dict[str, asyncio.Future[list[SharedBytes]]] = {}
        self._taking: asyncio.Task[None] | None = None

    async def take(self, ticket: str) -> list[SharedBytes]:
        """The rows in shared memory that a ticket stands for; "": none. Raises ShardLost."""
        if not ticket:
            return []
        loop = asyncio.get_running_loop()
        rows: asyncio.Future[list[SharedBytes]] = loop.create_future()
        self._waiting[ticket] = rows
        if self._taking is None:
            # A context of its own: in a request's, Serve would cancel the calls with the request.
            self._taking = loop.create_task(self._take_all(), context=Context())
        try:
            return await rows
        finally:
            del rows  # a failure's traceback would refer to it, in a cycle that keeps the request

    async def _take_all(self) -> None:
        while self._waiting:
            waiting, self._waiting = self._waiting, {}
            await self._take(waiting)
            del waiting  # it holds references to rows
        self._taking = None

    async def _take(self, waiting: dict[str, asyncio.Future[list[SharedBytes]]]) -> None:
        try:
            async with asyncio.timeout(FETCH_SECONDS):
                if self._actor is None:
                    self._actor = await asyncio.to_thread(
                        ray.get_actor, self._actor_name, SERVE_NAMESPACE
                    )
                taken = await self._actor.__ray_call__.remote(take, list(waiting))
        except Exception as error:
            reason = f"its rows in shared memory are lost: {brief(error)}"
            taken = [ShardLost(reason) for _ in waiting]
        for future, rows in zip(waiting.values(), taken, strict=True):
            if future.done():  # nobody waits any more
                continue
            if rows is None:
                rows = ShardLost("its rows in shared memory were not taken in time")
            if isinstance(rows, ShardLost):
                future.set_exception(rows)
            else:
                future.set_result(rows)


def is_local_testing() -> bool:
    """Whether this is Serve's local testing mode: no replica, no request routers."""
    try:
        serve.get_replica_context()
    except RayServeException:
        return True
    return False


def node_id() -> str:
    found: str = ray.get_runtime_context().get_node_id()
    return found


def brief(error: Exception) -> str:
    """One line: Ray's messages fill a page."""
    return (str(error).strip().splitlines() or [""])[0] or type(error).__name__
