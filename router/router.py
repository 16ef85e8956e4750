"""The Router, which runs in each ingress process and as a Serve deployment for callers inside Ray.

Each router distributes the requests that reach it. Several routers stay in balance through the
loads that replicas report.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from random import Random
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from actors.options import TracingOptions, refused, updated
from actors.rows.protocol import RowsPlace
from actors.store.kept import Kept
from actors.telemetry.tracing import ORIGIN, Origin, name_requests, open_spans
from actors.types import Answer, Dtype, Media
from router.dispatch import Dispatcher, now
from router.metrics import RouterMetrics
from router.options import LIVE_KEYS, RouterOptions, RouterSection
from router.policy.balance import POLICIES
from router.replicas.serve_fleet import ServeFleet


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One encoder replica, as this router knows it."""

    replica: str
    metadata: Mapping[str, Any]  # what it reported about itself when it became ready
    own_patches: int  # outstanding patches that this router sent
    reported_patches: int  # outstanding patches of all routers, about a second old
    excluded: bool  # it failed recently and gets no new work


@dataclass(frozen=True, slots=True)
class RouterStatus:
    replicas: tuple[ReplicaStatus, ...]
    """Serve lists a replica once all its graphs are captured."""
    outstanding_patches: int


class Router:
    """Spreads items over the encoder replicas."""

    def __init__(
        self,
        encoders: Sequence[DeploymentHandle],
        options: RouterOptions,
        fingerprint: str | None = None,
        tracing: TracingOptions = TracingOptions(),  # noqa: B008, frozen
        cache_max_bytes: int = 0,
        *,
        borrows: bool = False,
    ) -> None:
        """`encoders`: handles of deployments with PinnedRequestRouter. `fingerprint`: the model's;
        replicas of another model are not used. `cache_max_bytes`: size of each replica's cache.
        `borrows`: rows of replicas on this node are read in place, so embeddings must not be passed
        on to other processes.
        """
        name_requests()
        self._options = options
        self._running = False
        self._metrics = RouterMetrics()
        spans = open_spans(tracing, "router")
        self._fleet = ServeFleet(encoders, fingerprint, spans, self._metrics, borrows=borrows)
        plan = POLICIES[options.policy](Random())
        self._dispatcher = Dispatcher(self._fleet, options, plan, self._metrics, cache_max_bytes)

    async def reconfigure(self, user_config: Any) -> None:
        """Serve calls this with the deployment's `user_config`, at start and when it changes."""
        with refused(running=self._running):
            found = updated(RouterSection(router=self._options), user_config, {"router": LIVE_KEYS})
            self.configure(found.router)

    def configure(self, options: RouterOptions) -> None:
        self._dispatcher.configure(options, POLICIES[options.policy](Random()))

    async def check_health(self) -> None:
        """Serve calls this once the replica has started, and then periodically."""
        self._running = True

    async def encode(
        self,
        media: list[Media],
        dtype: Dtype = "bfloat16",
        timeout_seconds: float = 60,
        origin: Origin | None = None,
        keep: bool = False,
    ) -> list[Answer]:
        """Returns the answers in the order of `media`. Items that fail are answered with their
        error.

        Embeddings above a megabyte are references to Ray's shared memory, which here.py reads,
        unless this router borrows them.
        `origin` identifies the request if the caller is another process. With `keep`, the replicas
        keep the embeddings for a while, and answers have an id in `reference` instead of data.
        Raises Overloaded, TooLarge or Unavailable if the request as a whole is rejected.
        """
        if origin is not None:
            ORIGIN.set(origin)
        answers: dict[int, Answer] = {}
        stream = self._dispatcher.answers(media, dtype, timeout_seconds, keep=keep)
        async with aclosing(stream):
            async for position, answer in stream:
                answers[position] = answer
        return [answers[position] for position in range(len(media))]

    async def encode_stream(
        self,
        media: list[Media],
        dtype: Dtype = "bfloat16",
        timeout_seconds: float = 60,
        keep: bool = False,
    ) -> AsyncGenerator[tuple[int, Answer]]:
        """Yields (position, answer) of each item as soon as it is ready. Raises as `encode`."""
        answers = self._dispatcher.answers(media, dtype, timeout_seconds, early=True, keep=keep)
        async with aclosing(answers):
            async for position, answer in answers:
                yield position, answer

    def check_room(self) -> None:
        """Raises Overloaded if `encode` would reject any new item now. Costs next to nothing."""
        self._dispatcher.check_room()

    async def fetch(self, reference: str) -> Kept:
        """Returns what is kept under an id. Raises NotFound, or Unavailable (retryable)."""
        return await self._fleet.fetch(reference)

    async def release(self, reference: str) -> None:
        """Releases what is kept under an id. Raises NotFound, or Unavailable (retryable)."""
        await self._fleet.release(reference)

    async def release_all(self, references: list[str]) -> None:
        """As `release`, for many ids. Errors are ignored: what is not released expires."""
        await asyncio.gather(*map(self._fleet.release, references), return_exceptions=True)

    async def place(self, reference: str) -> RowsPlace:
        """Where the rows of an id are served. Raises NotFound, or Unavailable (retryable)."""
        return self._fleet.rows_place(reference)

    async def status(self) -> RouterStatus:
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
        return RouterStatus(replicas, ledger.outstanding.patches)

    def pools(self) -> dict[str, str]:
        """The pool of each replica that belongs to one."""
        return {name: one.pool for name, one in self._fleet.replicas().items() if one.pool}

    def precisions(self) -> dict[str, str]:
        """The precision of each replica."""
        return {name: one.precision for name, one in self._fleet.replicas().items()}

    def metrics(self) -> str:
        ledger = self._dispatcher.ledger
        own = {name: ledger.own(name) for name in self._fleet.replicas()}
        return self._metrics.render(own, ledger.waiting)

    def scrape(self) -> tuple[str, str]:
        """This replica's id and `metrics`. A broadcast does not tell which replica answered."""
        return serve.get_replica_context().replica_id.unique_id, self.metrics()
