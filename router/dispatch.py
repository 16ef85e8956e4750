"""From the items of a request to their answers: admit, plan, send, plan again what was lost.

Knows a fleet as something that takes shards and may lose them; Ray is serve_fleet.py's business.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio import FIRST_COMPLETED
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextvars import Context
from functools import partial

from actors.errors import DeadlineExceeded, EncodeFailed, Overloaded, ServiceError, Unavailable
from actors.telemetry.request_context import ORIGIN
from actors.types import Answer, Dtype, Embedding, Media
from router.metrics import RouterMetrics
from router.options import RouterOptions
from router.policy.balance import Plan
from router.policy.cache_affinity import Holders, plan_around
from router.policy.coalesce import Carrier, Flight, Flights, key
from router.policy.given import Given
from router.policy.ledger import Ledger
from router.replicas.fleet import Fleet, ReplicaDied, ReplicaFull, ShardLost
from router.replicas.liveness import Watch

logger = logging.getLogger("ray.serve")

POLL_SECONDS = 0.02
BACKOFF_SECONDS = 0.1
"""Before a full replica is tried again. Before replicas that all failed: doubles with each loss."""
MARGIN_SECONDS = 0.05
"""How much earlier a replica gives late items up, so that the others of the call are in time."""
MARGIN_PART = 0.1
"""Of the time that is left: the most that the margin may be."""
LONE_DEATHS = 2
"""Replicas that may die of an item in a call of its own before it is given up."""


class Dispatcher:
    """Everything that one router has on its way."""

    def __init__(
        self,
        fleet: Fleet,
        options: RouterOptions,
        plan: Plan,
        metrics: RouterMetrics,
        cache_max_bytes: int = 0,
    ) -> None:
        """`cache_max_bytes`: of each replica's cache of embeddings."""
        self._fleet = fleet
        self._options = options
        self._plan = plan
        self._metrics = metrics
        self._version = -1
        self._flights = Flights(self._landed)
        self._holders = Holders(cache_max_bytes if options.cache_affinity else 0)
        self._watch = Watch(fleet.ask, options.stall_seconds)
        self._given = Given(fleet, self._watch)
        self.ledger = Ledger(
            options.max_outstanding_patches, options.exclude_seconds, options.max_queue_seconds
        )

    async def answers(
        self,
        media: Sequence[Media],
        dtype: Dtype,
        timeout_seconds: float,
        *,
        singly: bool = False,
        keep: bool = False,
    ) -> AsyncGenerator[tuple[int, Answer]]:
        """(Position, answer) of every item once, as they come. Close it when you stop early.

        The items of a replica come together, in one call; `singly`: each as soon as it is done.
        `keep`: their replicas keep embeddings, and answers have ids in place of data.
        Items that fail are answered with their error. Raises Overloaded, TooLarge, or Unavailable
        where there is no replica: then nothing was begun.
        """
        deadline = now() + timeout_seconds
        replicas = await self._replicas(deadline)
        flights, opened = self._board(media, dtype, deadline, keep=keep)
        self._launch(opened, replicas, singly=singly)
        try:
            waiting: dict[asyncio.Future[Answer], list[int]] = {}
            for position, flight in enumerate(flights):
                waiting.setdefault(flight.answer, []).append(position)
            while waiting:
                done, _ = await asyncio.wait(
                    waiting, timeout=max(0.0, deadline - now()), return_when=FIRST_COMPLETED
                )
                late = DeadlineExceeded(
                    f"not encoded within {timeout_seconds:g} s; allow more time or send fewer items"
                )
                for future in done or list(waiting):
                    places = waiting.pop(future)
                    found: list[Answer] = [late] * len(places)
                    if future.done():
                        flight = flights[places[0]]
                        found = await self._given.answers(flight, len(places), late, deadline)
                    for position, answer in zip(places, found, strict=True):
                        yield position, answer
        finally:
            for flight in flights:
                self._flights.leave(flight)

    def check_room(self) -> None:
        """Raises Overloaded where whatever comes would be refused, unless all of it is in flight.

        Costs next to nothing: it spares the reading of what would be refused after all.
        """
        if self.refresh():
            with self._metrics.rejections.count_exceptions(Overloaded):
                self.ledger.check_room(now())

    def refresh(self) -> Mapping[str, int]:
        """Takes the latest reports to the ledger; gives those of the replicas that there are."""
        version, reports = self._fleet.reports()
        if version != self._version:
            self._version = version
            self.ledger.report(reports)
            self._holders.keep(reports)
        return reports

    async def _replicas(self, deadline: float) -> list[str]:
        """Those to plan for. Waits a little for the first; then raises Unavailable."""
        give_up = min(deadline, now() + self._options.replica_wait_seconds)
        while not (reports := self.refresh()):
            if now() >= give_up:
                raise Unavailable("no encoder replica is ready; try again later")
            await asyncio.sleep(POLL_SECONDS)
        for replica in self._watch.silent:
            self.ledger.exclude(replica, now())
        answering = [replica for replica in reports if replica not in self._watch.silent]
        sound = [replica for replica in answering if not self.ledger.excluded(replica, now())]
        return sound or answering or list(reports)

    def _board(
        self, media: Sequence[Media], dtype: Dtype, deadline: float, *, keep: bool
    ) -> tuple[list[Flight], list[Flight]]:
        """A flight for each item, joined; and those of them that are new. All or nothing."""
        fresh: dict[object, Media] = {}
        for position, item in enumerate(media):
            if not self._options.coalesce:
                fresh[position] = item
            elif self._flights.get(wanted := key(item, dtype, keep=keep)) is None:
                fresh.setdefault(wanted, item)
        costs = [item.plan.patches for item in fresh.values()]
        with self._metrics.rejections.count_exceptions(Overloaded):
            reservations = self.ledger.admit(costs, now())
        opened = [
            Flight(item, dtype, reservation, asyncio.Future(), deadline, keep)
            for item, reservation in zip(fresh.values(), reservations, strict=True)
        ]
        flights = opened
        if self._options.coalesce:
            for flight in opened:
                self._flights.open(flight)
            found = [self._flights.get(key(item, dtype, keep=keep)) for item in media]
            flights = [flight for flight in found if flight is not None]
            self._metrics.coalesced.inc(len(media) - len(opened))
        for flight in flights:
            self._flights.join(flight, deadline)
        return flights, opened

    def _launch(self, flights: Sequence[Flight], replicas: Sequence[str], *, singly: bool) -> None:
        """Plans the items over these replicas and sends the shards, or their items one by one."""
        media = [flight.media for flight in flights]
        costs = [item.plan.patches for item in media]
        loads = self.ledger.loads(replicas, now())
        placed = self._holders.place(media, loads)
        self._metrics.held.inc(len(placed))
        for shard in plan_around(self._plan, costs, loads, placed):
            part = [flights[item] for item in shard.items]
            for together in [[flight] for flight in part] if singly else [part]:
                self._send(shard.replica, together)

    def _send(self, replica: str, flights: list[Flight]) -> None:
        """One call."""
        # A context of its own: in a request's, Serve would cancel the call with the request.
        context = Context()
        context.run(ORIGIN.set, flights[0].origin)
        task = asyncio.get_running_loop().create_task(
            self._carry(replica, flights), context=context
        )
        carrier = Carrier(flights, task)
        for flight in flights:
            flight.carrier = carrier
            self.ledger.assign(flight.reservation, replica)
        self._metrics.sent(replica, sum(flight.media.plan.patches for flight in flights))
        # Not in `_carry`: a task that is cancelled before its first step runs none of it.
        task.add_done_callback(partial(self._arrived, carrier))

    async def _carry(self, replica: str, flights: Sequence[Flight]) -> None:
        """One call. What it does not settle is planned again."""
        deadline = max(flight.deadline for flight in flights)
        left = max(0.0, deadline - now())
        left -= min(MARGIN_SECONDS, MARGIN_PART * left)
        media = [flight.media for flight in flights]
        # No item is given up for replicas that died without it, as all of a node do at once.
        careful = any(flight.losses for flight in flights)
        singly = False
        try:
            async with self._watch.over(replica):
                first = flights[0]
                reply = await self._fleet.encode(
                    replica, media, first.dtype, left, keep=first.keep, careful=careful
                )
        except ReplicaFull:
            await asyncio.sleep(BACKOFF_SECONDS)
        except ShardLost as error:
            singly = isinstance(error, ReplicaDied)
            self._lose(replica, flights, error)
        except ServiceError as error:
            self._deliver(replica, flights, [error] * len(flights), deadline)
        else:
            self._deliver(replica, flights, reply.answers, deadline)
            self.ledger.hear(replica, reply.outstanding_patches, now())
            del reply  # embeddings are large; this frame may now wait for a replica
        if wanted := self._wanted(flights):
            await self._again(wanted, singly=singly)

    def _deliver(
        self, replica: str, flights: Sequence[Flight], answers: list[Answer], deadline: float
    ) -> None:
        """Lands all but items that another replica, or a more patient caller's time, may help."""
        refused = []
        for flight, answer in zip(flights, answers, strict=True):
            if isinstance(answer, Unavailable):
                refused.append((flight, answer))
            elif not isinstance(answer, DeadlineExceeded) or flight.deadline <= deadline:
                self._flights.land(flight, answer)
        if refused:
            self._lose(replica, [flight for flight, _ in refused], refused[0][1])

    def _lose(self, replica: str, flights: Sequence[Flight], error: Exception) -> None:
        """Counts a loss; ends those that have had enough of them."""
        logger.warning("replica %s lost %d items: %s", replica, len(flights), error)
        self.ledger.exclude(replica, now())
        alone = len(flights) == 1 and isinstance(error, ReplicaDied)
        for flight in flights:
            flight.losses += 1
            flight.lone_deaths += alone
            if flight.lone_deaths >= LONE_DEATHS:
                failed = "its replica died twice while it was encoded; do not send it again"
                self._flights.land(flight, EncodeFailed(failed))
            elif flight.losses >= self._options.max_attempts:
                reason = f"given up after {flight.losses} attempts; last replica {replica}: {error}"
                self._flights.land(flight, Unavailable(reason))

    async def _again(self, flights: Sequence[Flight], *, singly: bool) -> None:
        """Plans them once more, over the replicas that there are by now."""
        for flight in flights:
            self.ledger.assign(flight.reservation, None)
        deadline = max(flight.deadline for flight in flights)
        try:
            replicas = await self._replicas(deadline)
            if all(self.ledger.excluded(replica, now()) for replica in replicas):
                await asyncio.sleep(BACKOFF_SECONDS * 2 ** flights[0].losses)
                replicas = await self._replicas(deadline)
        except Unavailable as error:
            for flight in flights:
                self._flights.land(flight, error)
            return
        wanted = self._wanted(flights)
        self._metrics.replans.inc(len(wanted))
        self._launch(wanted, replicas, singly=singly)

    def _wanted(self, flights: Sequence[Flight]) -> list[Flight]:
        """Those without an answer that somebody waits for; the others end here."""
        for flight in flights:
            if not flight.waiting:
                self._flights.land(flight, None)
        return [flight for flight in flights if not flight.answer.done()]

    def _arrived(self, carrier: Carrier, task: asyncio.Task[None]) -> None:
        """Leaves nothing without an answer, whatever ended the task."""
        error: ServiceError = Unavailable("the router is stopping; try again")
        if not task.cancelled() and (failure := task.exception()):
            logger.error("a shard failed", exc_info=failure)
            error = EncodeFailed(f"the encoder failed: {failure}")
        for flight in carrier.flights:
            if flight.carrier is carrier:
                self._flights.land(flight, error)

    def _landed(self, flight: Flight) -> None:
        answer = None if flight.answer.cancelled() else flight.answer.result()
        if isinstance(answer, Embedding):
            self._holders.saw(flight.media, answer)
        self.ledger.release(flight.reservation, now(), done=isinstance(answer, Embedding))


def now() -> float:
    """Seconds of the running loop's clock."""
    return asyncio.get_running_loop().time()
