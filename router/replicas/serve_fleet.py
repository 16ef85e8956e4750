"""The encoder replicas of Serve deployments: gRPC for calls, Ray and Serve for everything else.

Serve reports which replicas there are, and is notified of those that died. Rows in Ray's shared
memory are handed over by a Ray call, because object references only travel through Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from actors.errors import NotFound, Unavailable
from actors.rows.protocol import RowsPlace
from actors.rpc.codec import EncodeCall, Fields, ReceivedRows, kept_of, message_fields, reply_of
from actors.rpc.server import take
from actors.store.kept import Kept
from actors.telemetry.tracing import ORIGIN, Spans
from actors.types import Bytes, Dtype, Embedding, Media, Reply, SharedBytes, Work
from router.metrics import RouterMetrics
from router.policy.ledger import tells
from router.replicas.fleet import (
    PUBLISHED,
    PinnedReplicaUnavailable,
    Replica,
    ReplicaUnreachable,
    ShardLost,
    costs,
    detached,
)
from router.replicas.liveness import Liveness
from router.replicas.pinned import by_reference, pinned
from router.replicas.rpc import ReplicaChannel

LOST = (
    RayActorError,
    ObjectLostError,
    TaskCancelledError,
    DeploymentUnavailableError,
    PinnedReplicaUnavailable,
)
"""What Ray raises if the replica is at fault, not the request."""

GRACE_SECONDS = 1.0  # how much longer than its items a call may take as a whole
TAKE_SECONDS = 10.0  # time limit for handing over rows in Ray's shared memory
FETCH_SECONDS = 5.0
"""Time limit for a fetch or a release. A fetch may wait until its rows have been written."""
CONFIRM_SECONDS, CONFIRMATIONS = 0.5, 10
"""Interval and number of questions to Serve whether an unreachable replica is dead."""
LOCAL, REMOTE = "local", "remote"
"""Where a replica is: on this process's node, or on another one."""
NONE: Mapping[str, Replica] = {}
"""The replicas of a deployment that has published nothing yet."""
SERVE_NAMESPACE = "serve"  # of the actors of Serve's replicas


class ServeFleet:
    """A fleet.Fleet of the replicas of all pools, which also fetches what replicas keep."""

    def __init__(
        self,
        encoders: Sequence[DeploymentHandle],
        fingerprint: str | None,
        spans: Spans | None = None,
        metrics: RouterMetrics | None = None,
        *,
        borrows: bool = False,
    ) -> None:
        """`fingerprint`: the model's. Replicas of another one are left out, as in a rollout.
        `borrows`: rows of replicas on this node are read in place, so their embeddings must not be
        passed on to other processes."""
        self._spans = spans or Spans()
        self._metrics = metrics or RouterMetrics()
        self._fingerprint = fingerprint
        self._borrows = borrows
        # `options` starts the handle's request router, which publishes the replicas.
        self._handles = {
            (one.app_name, one.deployment_name): by_reference(one, "encode") for one in encoders
        }
        self._read: list[Mapping[str, Replica]] = []
        self._reports: dict[str, Replica] = {}
        self._near: frozenset[str] = frozenset()
        self._tell = False
        self._node = node_id()
        self._connections: dict[str, tuple[ReplicaChannel, HandOver]] = {}
        self._confirming: dict[str, asyncio.Task[None]] = {}
        self._heard: Callable[[str, Work], None] = lambda *_: None
        self._keepers = Liveness(self.check, self.reach, FETCH_SECONDS)

    def replicas(self) -> Mapping[str, Replica]:
        """All usable replicas, those of a deployment in the order of their ids. Also called from
        another thread, in which Serve runs scrapes."""
        return {
            name: one
            for published in self._published()
            for name, one in published.items()
            if self._is_ours(one)
        }

    def _published(self) -> list[Mapping[str, Replica]]:
        return [PUBLISHED.get(deployment, NONE) for deployment in self._handles]

    def reports(self) -> Mapping[str, Replica]:
        published = self._published()
        if list(map(id, published)) != list(map(id, self._read)):
            self._read = published
            replicas = self.replicas()
            self._reports = dict(replicas)
            self._tell = tells(costs(replicas))
            self._near = frozenset(name for name in replicas if self._where(name) == LOCAL)
            for gone in self._connections.keys() - replicas.keys():
                channel, _ = self._connections.pop(gone)
                channel.retire()
        return self._reports

    def near(self) -> frozenset[str]:
        return self._near

    def listen(self, heard: Callable[[str, Work], None]) -> None:
        self._heard = heard

    def _is_ours(self, replica: Replica) -> bool:
        """Whether a replica has our model and protocol version. In a rollout, a deployment may have
        replicas of two models or two protocol versions."""
        fingerprint = replica.metadata.get("fingerprint")
        same = None in (self._fingerprint, fingerprint) or fingerprint == self._fingerprint
        return same and replica.endpoint is not None

    def _where(self, replica: str) -> str:
        members = (published.get(replica) for published in self._published())
        member = next(filter(None, members), None)
        near = member and member.endpoint and member.endpoint.node == self._node
        return LOCAL if near else REMOTE

    async def encode(
        self,
        replica: str,
        media: list[Media],
        dtype: Dtype,
        timeout_seconds: float,
        *,
        keep: bool = False,
        waiting_per_sent: float = 0,
        early: Callable[[Reply], None] | None = None,
    ) -> Reply:
        """Cancelling it cancels the call."""
        patches = sum(item.plan.patches for item in media)
        with self._spans.span(
            "route", "client", replica=replica, items=len(media), patches=patches
        ):
            channel, _ = self._connection(replica)
            call = EncodeCall(
                media,
                dtype,
                timeout_seconds,
                ORIGIN.get(),
                keep,
                waiting_per_sent,
                early=early is not None,
                borrower=channel.borrower.process if channel.borrower else 0,
                tell=self._tell,
            )
            request = message_fields(call)
            where = self._where(replica)  # before the call, because the replica may not outlive it

            def received(message: Any, rows: ReceivedRows) -> Reply:
                reply = reply_of(message, rows)
                found = [one for one in reply.answers if isinstance(one, Embedding)]
                self._metrics.bytes.labels("rows", where).inc(sum(one.size_bytes for one in found))
                return reply

            self._metrics.bytes.labels("items", where).inc(sum(one.size_bytes for one in media))
            return received(
                *await self._call(
                    replica,
                    "encode",
                    request,
                    timeout_seconds + GRACE_SECONDS,
                    early and (lambda message, rows: early(received(message, rows))),
                )
            )

    async def check(self, replica: str) -> None:
        await self._call(replica, "check", {})

    async def reach(self, replica: str) -> None:
        if connection := self._connections.get(replica):
            await connection[0].reach()

    async def fetch(self, reference: str) -> Kept:
        """Returns what is kept under an id. Raises NotFound, or Unavailable (retryable)."""
        async with self._keeper(reference) as (replica, name):
            where = self._where(replica)
            reply, rows = await self._call(replica, "fetch", {"name": name})
        if not reply.HasField("kept"):
            raise unknown(reference)
        kept = kept_of(reply.kept, rows)
        self._metrics.bytes.labels("rows", where).inc(kept.embedding.size_bytes)
        return kept

    async def release(self, reference: str) -> None:
        """Releases what is kept under an id. Raises NotFound, or Unavailable (retryable)."""
        async with self._keeper(reference) as (replica, name):
            reply, _ = await self._call(replica, "release", {"name": name})
        if not reply.released:
            raise unknown(reference)

    def rows_place(self, reference: str) -> RowsPlace:
        """Where the replica that keeps an id serves rows. Raises NotFound, or Unavailable."""
        replica, _ = self._kept_by(reference)
        endpoint = self.reports()[replica].endpoint
        if endpoint is None or not endpoint.rows_unix:
            raise unknown(reference)
        return endpoint.rows

    def _kept_by(self, reference: str) -> tuple[str, str]:
        """The replica and the name that an id stands for. Raises NotFound, or Unavailable."""
        replicas = self.reports()
        if not replicas:
            raise Unavailable("no encoder replica is known here yet: try again")
        replica, _, name = reference.partition(".")
        if replica not in replicas:
            raise unknown(reference)
        return replica, name

    @asynccontextmanager
    async def _keeper(self, reference: str) -> AsyncIterator[tuple[str, str]]:
        """The replica and the name that an id stands for, around a call to that replica."""
        replica, name = self._kept_by(reference)
        try:
            if replica in self._keepers.silent:
                raise ShardLost("it does not answer")
            async with asyncio.timeout(FETCH_SECONDS), self._keepers.guard(replica):
                yield replica, name
        except (ShardLost, TimeoutError) as error:
            why = f"cannot be reached ({error})"
            if isinstance(error, TimeoutError):
                why = f"did not answer within {FETCH_SECONDS:g} s"
            raise Unavailable(
                f"replica {replica}, which keeps the embedding, {why}: try again, or encode the "
                "item again"
            ) from error

    async def _call(
        self,
        replica: str,
        method: str,
        request: Fields,
        timeout_seconds: float | None = None,
        early: Callable[[Any, ReceivedRows], None] | None = None,
    ) -> tuple[Any, ReceivedRows]:
        """Returns the reply and its rows that are not in the message. `early` is called with those
        of replies before the last."""
        # Before the call, because a draining replica still answers but is no longer listed.
        channel, hand_over = self._connection(replica)

        async def take_early(reply: Any, lent: list[Bytes]) -> None:
            assert early, "a reply in parts that nobody asked for. This is a bug."
            early(reply, ReceivedRows(await hand_over.take(reply.ticket), lent))

        try:
            reply, lent = await channel.call(method, request, timeout_seconds, take_early)
        except ShardLost:
            self._confirm(replica)
            raise
        return reply, ReceivedRows(await hand_over.take(getattr(reply, "ticket", "")), lent)

    def _connection(self, replica: str) -> tuple[ReplicaChannel, HandOver]:
        """The connection to a replica, which is opened by the first call."""
        member = self.replicas().get(replica)
        if member is None or member.endpoint is None:
            raise ReplicaUnreachable(f"replica {replica} is gone")
        if replica not in self._connections:
            channel = ReplicaChannel(
                member.endpoint,
                self._node,
                lambda work: self._heard(replica, work),
                borrows=self._borrows,
            )
            self._connections[replica] = channel, HandOver(member.endpoint.actor)
        return self._connections[replica]

    def _confirm(self, replica: str) -> None:
        """Asks Serve in the background whether a replica is dead.

        If it is, Serve's request router drops it at once, not only after the next health check.
        """
        if replica not in self._confirming:
            self._confirming[replica] = task = detached(self._ask_serve(replica))
            task.add_done_callback(lambda _: self._confirming.pop(replica, None))

    async def _ask_serve(self, replica: str) -> None:
        for _ in range(CONFIRMATIONS):
            handles = zip(self._handles.values(), self._published(), strict=True)
            its = [handle for handle, published in handles if replica in published]
            if not its:
                return
            with suppress(*LOST):
                with suppress(RayTaskError):  # unhealthy, but alive
                    await pinned(its[0], replica).check_health.remote()
                return
            await asyncio.sleep(CONFIRM_SECONDS)


class HandOver:
    """Exchanges tickets of one replica for rows in Ray's shared memory.

    One call at a time takes all tickets that arrived meanwhile, because a Ray call costs
    milliseconds. It is not a call of a Serve handle, because handles stream their answers, and
    object references in a stream are sometimes released before a receiver on another node holds
    them.
    """

    def __init__(self, actor: str) -> None:
        """`actor`: the replica's name."""
        self._actor_name = actor
        self._actor: Any = None
        self._waiting: dict[str, asyncio.Future[list[SharedBytes]]] = {}
        self._taking: asyncio.Task[None] | None = None

    async def take(self, ticket: str) -> list[SharedBytes]:
        """The rows in Ray's shared memory that a ticket stands for; "": none. Raises ShardLost."""
        if not ticket:
            return []
        rows: asyncio.Future[list[SharedBytes]] = asyncio.Future()
        self._waiting[ticket] = rows
        if self._taking is None:
            self._taking = detached(self._take_all())
        try:
            return await rows
        finally:
            del rows  # else a failure's traceback would refer to it, in a cycle with the request

    async def _take_all(self) -> None:
        while self._waiting:
            waiting, self._waiting = self._waiting, {}
            await self._take(waiting)
            del waiting  # it holds references to rows
        self._taking = None

    async def _take(self, waiting: dict[str, asyncio.Future[list[SharedBytes]]]) -> None:
        try:
            async with asyncio.timeout(TAKE_SECONDS):
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


def unknown(reference: str) -> NotFound:
    if "." not in reference:
        return NotFound(
            f"{reference[:100]!r} is not an id: encode an item with the option `reference` to get "
            "one"
        )
    return NotFound(
        f"no embedding is kept under {reference[:100]!r}: it expired, was released or evicted, or "
        "its replica ended; encode the item again"
    )


def node_id() -> str:
    found: str = ray.get_runtime_context().get_node_id()
    return found


def brief(error: Exception) -> str:
    """The error in one line, because Ray's messages fill a page."""
    return (str(error).strip().splitlines() or [""])[0] or type(error).__name__
