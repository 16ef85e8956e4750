"""From the items of a request to their answers: admit, queue, plan, send, retry what was lost.

The methods are in the order in which an item passes through them. Identical items in flight are
encoded once, however many requests wait for them. While the replicas have enough to do, requests
wait here, where small ones overtake large ones.
"""

from __future__ import annotations

import asyncio
import logging
import math
from asyncio import FIRST_COMPLETED
from collections.abc import AsyncGenerator, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from actors.errors import DeadlineExceeded, EncodeFailed, Overloaded, ServiceError, Unavailable
from actors.telemetry.tracing import ORIGIN, Origin
from actors.types import Answer, Cost, Dtype, Embedding, Media, Reply, Work
from router.metrics import RouterMetrics
from router.options import RouterOptions
from router.policy.balance import CacheAffinity, Plan, plan_around
from router.policy.fair_queue import FairQueue
from router.policy.ledger import Ledger, Reservation
from router.policy.pools import Pools, Sizes
from router.replicas.fleet import Fleet, Replica, ReplicaDied, ShardLost, costs, detached
from router.replicas.liveness import Liveness

logger = logging.getLogger("ray.serve")

POLL_SECONDS = 0.02  # between checks for a first replica
WATCH_SECONDS = 0.5  # between checks whether new replicas have room for waiting requests
TOLD_SECONDS = 0.1
"""With several pools, how long a count of the patches that wait for a replica is reused."""
BACKOFF_SECONDS = 0.1
"""Wait before replicas that have all failed are tried again. Doubles with each loss."""
MARGIN_SECONDS, MARGIN_FRACTION = 0.05, 0.1
"""How long before the caller's deadline a replica times out late items, so that the other items of
the call arrive in time. At most this fraction of the time that is left."""
ITEM_PATCHES = 1000
"""Sending and decoding an item takes about as long as encoding this many patches."""
MAX_LONE_DEATHS = 2
"""An item is rejected when this many replicas died while it was the only item of their call."""


Key = tuple[tuple[str, ...], Dtype, bool]
"""What determines an embedding and where it is: the item's identity, the dtype, and whether the
rows may stay on the device."""


def key(media: Media, dtype: Dtype) -> Key:
    return media.identity, dtype, media.on_device


@dataclass(slots=True, eq=False)
class InFlightItem:
    """One item from its admission to its answer. Several requests may wait for it."""

    media: Media
    dtype: Dtype
    reservation: Reservation
    deadline: float
    """Latest deadline of the requests that wait for it, in seconds of the event loop's clock."""
    keep: bool = False
    """Its replica keeps the embedding under an id that belongs to one request only."""
    early: bool = False
    """Its answer is wanted before the other items of its call are done."""
    answer: asyncio.Future[Answer] = field(default_factory=asyncio.Future)
    waiting: int = 0
    """How many requests wait for it. A request counts once for each of the item's positions."""
    losses: int = 0
    """How many replicas were lost while they had it, or refused it."""
    lone_deaths: int = 0
    """How many of these died while it was the only item of its call."""
    origin: Origin = field(default_factory=ORIGIN.get)
    """The request that asked for it first."""
    call: ShardCall | None = None
    """None before it is sent. Cleared with the answer, because it would keep the embeddings of
    other items alive."""

    @property
    def unsent(self) -> bool:
        return self.call is None and not self.answer.done()


@dataclass(slots=True, eq=False)
class ShardCall:
    """One call to a replica. Its items are cancelled together or not at all."""

    items: list[InFlightItem]
    task: asyncio.Task[None]

    @property
    def wanted(self) -> bool:
        return any(item.waiting for item in self.items if not item.answer.done())


@dataclass(slots=True, eq=False)
class WaitingRequest:
    """Items that are sent together. An item of several requests is sent with the first of them."""

    items: list[InFlightItem]
    tokens: tuple[int, ...] = field(init=False)
    """The largest number of tokens that one of the items needs, per path."""
    patches: int = field(init=False)

    def __post_init__(self) -> None:
        needed = (item.media.plan.least_tokens for item in self.items)
        self.tokens = tuple(map(max, zip(*needed, strict=False)))
        self.patches = sum(item.media.plan.patches for item in self.items)


class Dispatcher:
    """All items that one router has in flight."""

    def __init__(
        self,
        fleet: Fleet,
        options: RouterOptions,
        plan: Plan,
        metrics: RouterMetrics,
        cache_max_bytes: int = 0,
    ) -> None:
        self._fleet = fleet
        self._options = options
        self._plan = plan
        self._metrics = metrics
        self._cache_max_bytes = cache_max_bytes
        self._reports: Mapping[str, Replica] | None = None
        self._costs: Mapping[str, Cost | None] = {}
        self._pools = Pools({})
        self._told: dict[str, tuple[float, float]] = {}
        """When each replica was last told how much waits for it, and what it was told."""
        self._joinable: dict[Key, InFlightItem] = {}
        """Items in flight that other requests may join."""
        self._queue = FairQueue[WaitingRequest]()
        self._watch: asyncio.Task[None] | None = None
        self._affinity = CacheAffinity(cache_max_bytes if options.cache_affinity else 0)
        self._liveness = Liveness(fleet.check, fleet.reach, options.stall_seconds)
        self.ledger = Ledger(
            options.max_outstanding_patches, options.exclude_seconds, options.max_queue_seconds
        )
        fleet.listen(lambda replica, work: self.ledger.hear(replica, work, now()))

    def configure(self, options: RouterOptions, plan: Plan) -> None:
        """Changes the options for new requests. `stall_seconds` stays as it was."""
        if options.cache_affinity != self._options.cache_affinity:
            self._affinity = CacheAffinity(self._cache_max_bytes if options.cache_affinity else 0)
        self._options = options
        self._plan = plan
        self.ledger.configure(
            options.max_outstanding_patches, options.exclude_seconds, options.max_queue_seconds
        )

    async def answers(
        self,
        media: Sequence[Media],
        dtype: Dtype,
        timeout_seconds: float,
        *,
        early: bool = False,
        keep: bool = False,
    ) -> AsyncGenerator[tuple[int, Answer]]:
        """Yields (position, answer) of each item once, as answers arrive. Close it to stop early.

        The answers of a replica arrive together, at the end of its call; with `early`, each arrives
        as soon as it is ready. With `keep`, the replicas keep the embeddings, and answers have ids
        instead of data. Items that fail are answered with their error. Raises Overloaded or
        TooLarge, or Unavailable if there is no replica; in these cases no item was sent.
        """
        deadline = now() + timeout_seconds
        await self._any_replica(deadline)
        items = self._admit(media, dtype, deadline, keep=keep, early=early)
        unsent = list(dict.fromkeys(item for item in items if item.unsent))
        request = WaitingRequest(unsent)
        late = DeadlineExceeded(
            f"not encoded within {timeout_seconds:g} s; allow more time or send less at a time"
        )
        try:
            if unsent:
                self._queue.add(request, ITEM_PATCHES * len(unsent) + request.patches)
                self._send_waiting()
                if self._queue and (self._watch is None or self._watch.done()):
                    self._watch = detached(self._watch_for_room())
            waiting: dict[asyncio.Future[Answer], list[int]] = {}
            for position, item in enumerate(items):
                waiting.setdefault(item.answer, []).append(position)
            while waiting:
                done, _ = await asyncio.wait(
                    waiting, timeout=max(0.0, deadline - now()), return_when=FIRST_COMPLETED
                )
                for future in done or list(waiting):
                    answer = future.result() if future.done() else late
                    for position in waiting.pop(future):
                        yield position, answer
        finally:
            self._queue.remove(request)
            for item in items:
                self._leave(item)

    def check_room(self) -> None:
        """Raises Overloaded if any new item would be rejected now. Costs next to nothing.

        Called before a body is read, so that bodies of rejected requests are not read.
        """
        if self.refresh():
            with self._metrics.rejections.count_exceptions(Overloaded):
                self.ledger.check_room(now())

    def refresh(self) -> Mapping[str, Replica]:
        """Passes the latest reports of the replicas to the ledger, and returns them."""
        reports = self._fleet.reports()
        if reports is not self._reports:
            self._reports = reports
            self._costs = costs(reports)
            self._pools = Pools({name: one.largest_item for name, one in reports.items()})
            self._told = {}
            work = {name: replica.work for name, replica in reports.items()}
            self.ledger.report(work, self._costs.values())
            self._affinity.keep(reports)
        return reports

    async def _any_replica(self, deadline: float) -> None:
        """Waits up to `replica_wait_seconds` for a first replica, then raises Unavailable."""
        give_up = min(deadline, now() + self._options.replica_wait_seconds)
        while not self.refresh():
            if now() >= give_up:
                raise Unavailable("no encoder replica is ready; try again later")
            await asyncio.sleep(POLL_SECONDS)

    def _takers(self, items: Sequence[InFlightItem]) -> list[tuple[list[InFlightItem], list[str]]]:
        """Groups items by the replicas to plan them over. Items that the fewest pools can take come
        first."""
        self.refresh()
        found: dict[Sizes, list[InFlightItem]] = {}
        for item in items:
            found.setdefault(self._taken_by(item), []).append(item)
        return [(found[sizes], self._of(sizes)) for sizes in sorted(found, key=len)]

    def _taken_by(self, item: InFlightItem) -> Sizes:
        return self._pools.taking(item.media.plan.least_tokens)

    def _of(self, sizes: Sizes) -> list[str]:
        """The usable replicas of these pools: see `_sound`."""
        return self._sound(self._pools.replicas(sizes))

    def _sound(self, replicas: list[str]) -> list[str]:
        """The replicas that did not fail recently; if all did, those that answer; if none does,
        all."""
        silent, time = self._liveness.silent, now()
        for replica in silent:
            self.ledger.exclude(replica, time)
        answering = [replica for replica in replicas if replica not in silent]
        sound = [replica for replica in answering if not self.ledger.excluded(replica, time)]
        return sound or answering or replicas

    def _admit(
        self, media: Sequence[Media], dtype: Dtype, deadline: float, *, keep: bool, early: bool
    ) -> list[InFlightItem]:
        """Returns the item in flight for each position of a request.

        Items to be kept are not coalesced, because each position gets its own id.
        """
        if keep or not self._options.coalesce:
            items = self._reserve(media, dtype, deadline, keep=keep)
        else:
            wanted = {
                key(one, dtype): one for one in media if key(one, dtype) not in self._joinable
            }
            new = self._reserve(list(wanted.values()), dtype, deadline, keep=False)
            self._joinable.update(zip(wanted, new, strict=True))
            items = [self._joinable[key(one, dtype)] for one in media]
            self._metrics.coalesced.inc(len(media) - len(new))
        for item in items:
            item.waiting += 1
            item.deadline = max(item.deadline, deadline)
            item.early = item.early or early
        return items

    def _reserve(
        self, media: Sequence[Media], dtype: Dtype, deadline: float, *, keep: bool
    ) -> list[InFlightItem]:
        """Creates new items. Admits all of them or none."""
        with self._metrics.rejections.count_exceptions(Overloaded):
            reservations = self.ledger.admit([one.plan.work for one in media], now())
        return [
            InFlightItem(one, dtype, reservation, deadline, keep)
            for one, reservation in zip(media, reservations, strict=True)
        ]

    def _send_waiting(self) -> None:
        """Sends waiting requests while the replicas that can take them need more work.

        A request whose replicas have enough to do stays in the queue, and later requests do not get
        these replicas. Later requests that other replicas can take are still sent.
        """
        usable = self._sound(list(self.refresh()))
        kept: set[str] = set()
        full: set[Sizes] = set()
        place = 0
        while place < len(self._queue):
            if (sizes := self._pools.taking(self._queue[place].tokens)) in full:
                place += 1
                continue
            largest = self._of(sizes)
            free = [replica for replica in largest if replica not in kept]
            if largest and not (free and self._room(free)):
                kept.update(largest)
                full.add(sizes)
                if kept.issuperset(usable):
                    return
                continue
            request = self._queue.pop(place)
            items = [item for item in request.items if item.unsent]
            self._launch(items, kept)

    def _room(self, replicas: Iterable[str]) -> bool:
        return self.ledger.has_room({replica: self._costs.get(replica) for replica in replicas})

    async def _watch_for_room(self) -> None:
        """Sends waiting requests to replicas that appear while no call ends and no request
        arrives."""
        while self._queue:
            await asyncio.sleep(WATCH_SECONDS)
            self._send_waiting()

    def _launch(
        self, items: Sequence[InFlightItem], avoided: Collection[str] = (), *, singly: bool = False
    ) -> None:
        """Plans items over the replicas that can take them, without those to avoid if possible.

        Items that no replica can take fail with Unavailable, because while they waited they would
        take up the room of other items. If there is no replica at all, items wait a little.
        """
        for some, replicas in self._takers(items):
            if replicas:
                free = [replica for replica in replicas if replica not in avoided]
                self._plan_over(free or replicas, some, singly=singly)
            elif self._reports:
                for item in some:
                    self._complete(item, self._pools.too_large(item.media.plan.least_tokens))
            else:
                self._begin(some, self._launch_later(some, singly=singly))

    async def _launch_later(self, items: Sequence[InFlightItem], *, singly: bool) -> None:
        try:
            await self._any_replica(max(item.deadline for item in items))
        except Unavailable as error:
            for item in items:
                self._complete(item, error)
        self._launch(self._unanswered(items), singly=singly)

    def _plan_over(
        self, replicas: Sequence[str], items: Sequence[InFlightItem], *, singly: bool
    ) -> None:
        """Plans items over these replicas, and sends each replica its shard. With `singly`, sends
        one item per call, to find the one that kills replicas."""
        media = [item.media for item in items]
        near = self._fleet.near()
        # If loads are equal, plans choose the earlier replica.
        in_turn = sorted(replicas, key=lambda one: (one not in near, self.ledger.turn(one)))
        known = {replica: self._costs.get(replica) for replica in in_turn}
        groups = self.ledger.groups([one.plan.work for one in media], known, now())
        placed = self._affinity.place(media, groups)
        self._metrics.held.inc(len(placed))
        for replica, places in plan_around(self._plan, groups, placed).items():
            together = [items[place] for place in places]
            for sent in [[item] for item in together] if singly else [together]:
                self._send(replica, sent)

    def _send(self, replica: str, items: list[InFlightItem]) -> None:
        self._begin(items, self._call(replica, items))
        for item in items:
            self.ledger.assign(item.reservation, replica)
        self._metrics.sent(replica, sum(item.media.plan.patches for item in items))

    def _begin(self, items: list[InFlightItem], work: Coroutine[Any, Any, None]) -> None:
        task = detached(work)
        call = ShardCall(items, task)
        for item in items:
            item.call = call
        # Not in `work`, because a task that is cancelled before its first step runs none of it.
        task.add_done_callback(partial(self._ended, call))

    async def _call(self, replica: str, items: Sequence[InFlightItem]) -> None:
        """Calls a replica. Items that the call leaves without an answer are retried."""
        ORIGIN.set(items[0].origin)
        deadline = max(item.deadline for item in items)
        left = max(0.0, deadline - now())
        left -= min(MARGIN_SECONDS, MARGIN_FRACTION * left)
        media, first = [item.media for item in items], items[0]
        singly = False

        def deliver(reply: Reply) -> None:
            answered = [items[place] for place in reply.places] if reply.places else items
            self._deliver(replica, answered, reply.answers, deadline)

        try:
            async with self._liveness.guard(replica):
                reply = await self._fleet.encode(
                    replica,
                    media,
                    first.dtype,
                    left,
                    keep=first.keep,
                    waiting_per_sent=self._waiting_per_sent(replica),
                    early=deliver if any(item.early for item in items) else None,
                )
        except ShardLost as error:
            singly = isinstance(error, ReplicaDied)
            self._lose(replica, items, error)
        except ServiceError as error:
            self._deliver(replica, items, [error] * len(items), deadline)
        else:
            deliver(reply)
            outstanding = Work(reply.outstanding_patches, reply.outstanding_pairs)
            self.ledger.hear(replica, outstanding, now())
            del reply  # embeddings are large, and this frame may now wait for a replica
        if wanted := self._unanswered(items):
            # Their node may be lost, and the other replicas there with it.
            avoided = self._beside(replica) if singly else ()
            await self._retry(wanted, avoided, singly=singly)

    def _waiting_per_sent(self, replica: str) -> float:
        if not self._pools.several:
            return self.ledger.waiting_per_sent
        time, told = self._told.get(replica, (-math.inf, 0.0))
        if now() > time + TOLD_SECONDS:
            told = self._pooled_waiting_per_sent(replica)
            self._told[replica] = now(), told
        return told

    def _pooled_waiting_per_sent(self, replica: str) -> float:
        queued = (self._queue[place] for place in range(len(self._queue)))
        waiting = ((request.tokens, request.patches) for request in queued)
        return self._pools.waiting_per_sent(replica, waiting, self.ledger.own)

    def _deliver(
        self,
        replica: str,
        items: Sequence[InFlightItem],
        answers: Sequence[Answer],
        deadline: float,
    ) -> None:
        """Completes the items of a finished call.

        Items that this replica refused stay open to be retried, as do items that timed out while
        another request still has time for them.
        """
        refused = []
        for item, answer in zip(items, answers, strict=True):
            if isinstance(answer, Unavailable):
                refused.append((item, answer))
            elif not isinstance(answer, DeadlineExceeded) or item.deadline <= deadline:
                self._complete(item, answer)
        if refused:
            self._lose(replica, [item for item, _ in refused], refused[0][1])

    def _lose(self, replica: str, items: Sequence[InFlightItem], error: Exception) -> None:
        """Counts a loss for each item, and fails those that have reached their limit."""
        alone = len(items) == 1 and isinstance(error, ReplicaDied)
        lost = [item for item in items if not item.answer.done()]
        logger.warning("replica %s lost %d items: %s", replica, len(lost), error)
        self.ledger.exclude(replica, now())
        for item in lost:
            item.losses += 1
            item.lone_deaths += alone
            if item.lone_deaths >= MAX_LONE_DEATHS:
                failed = "its replica died twice while it was encoded; do not send it again"
                self._complete(item, EncodeFailed(failed))
            elif item.losses >= self._options.max_attempts:
                reason = f"gave up after {item.losses} attempts; last replica {replica}: {error}"
                self._complete(item, Unavailable(reason))

    def _unanswered(self, items: Sequence[InFlightItem]) -> list[InFlightItem]:
        """The items without an answer that requests wait for. Cancels those without a request."""
        for item in items:
            if not item.waiting:
                self._complete(item, None)
        return [item for item in items if not item.answer.done()]

    def _beside(self, replica: str) -> list[str]:
        """The replicas on the node of this one."""
        replicas = self._fleet.reports()
        if not (there := replicas.get(replica)) or not there.node:
            return []
        return [name for name, one in replicas.items() if one.node == there.node]

    async def _retry(
        self, items: Sequence[InFlightItem], avoided: Collection[str], *, singly: bool
    ) -> None:
        """Plans items again, after a backoff if all of their replicas failed recently."""
        for item in items:
            self.ledger.assign(item.reservation, None)
        over = [replica for _, replicas in self._takers(items) for replica in replicas]
        if over and all(self.ledger.excluded(replica, now()) for replica in over):
            await asyncio.sleep(BACKOFF_SECONDS * 2 ** items[0].losses)
        wanted = self._unanswered(items)
        self._metrics.replans.inc(len(wanted))
        self._launch(wanted, avoided, singly=singly)

    def _leave(self, item: InFlightItem) -> None:
        """Removes a request that no longer waits. Cancels the call if none waits for any of its
        items.

        An item without waiting requests stays in flight, and can be joined again, as long as
        another item keeps its call alive.
        """
        item.waiting -= 1
        if (call := item.call) is None:  # it has its answer, or was not sent
            if not item.waiting:
                self._complete(item, None)
            return
        if call.wanted:
            return
        call.task.cancel()
        for companion in call.items:
            self._complete(companion, None)

    def _ended(self, call: ShardCall, task: asyncio.Task[None]) -> None:
        """Completes the items of a call that have no answer, whatever ended its task."""
        error: ServiceError = Unavailable("the router is stopping; try again")
        if not task.cancelled() and (failure := task.exception()):
            logger.error("a shard failed", exc_info=failure)
            error = EncodeFailed(f"the encoder failed: {failure}")
        for item in call.items:
            if item.call is call:  # otherwise another call has it now
                self._complete(item, error)
        # Checks all replicas first, which costs less than finding the usable ones.
        if self._queue and (not self._reports or self._room(self._reports)):
            self._send_waiting()

    def _complete(self, item: InFlightItem, answer: Answer | None) -> None:
        """Completes an item; `answer` is None if no request wants one. A second call does
        nothing."""
        if item.answer.done():
            return
        if answer is None:
            item.answer.cancel()
        else:
            item.answer.set_result(answer)
        item.call = None
        if self._joinable.get(joined := key(item.media, item.dtype)) is item:
            del self._joinable[joined]
        if isinstance(answer, Embedding):
            self._affinity.saw(item.media, answer)
        self.ledger.release(item.reservation, now(), done=isinstance(answer, Embedding))


def now() -> float:
    """Seconds of the running loop's clock."""
    return asyncio.get_running_loop().time()
