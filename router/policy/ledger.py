"""Tracks how many patches each replica has, and whether there is room for more. Pure.

Times are arguments, in seconds of any monotonic clock.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from actors.errors import Overloaded, TooLarge
from actors.types import Cost, Work
from router.policy.balance import ReplicaGroup

REPORT_AGE_SECONDS = 1.5
"""How old a report may be: the period of reports plus their delay in Serve's controller."""
TOLD_REPLICAS = 16
"""The largest fleet in which a replica notifies each router immediately when items of other routers
arrive, and when the last of them is done. In larger fleets that many messages gain nothing, because
routers that all know the same replica to be idle choose it at the same time (BENCHMARKS.md,
Balance)."""
TOLD_PATCHES, TOLD_SECONDS = 4096, 0.004
"""Replicas that encode an image of this many patches in less time do not notify routers, because in
simulations the notifications arrive too late to help (BENCHMARKS.md, Balance)."""
RETRY_AFTER_SECONDS = (1.0, 30.0)
"""Minimum and maximum time that a rejected caller is told to wait."""
WAITED_FRACTION = 0.25
"""The queue is not limited before its oldest item has waited for this fraction of
`max_queue_seconds`."""
LOOK_BACK_SECONDS = 5.0
"""Busy time over which the throughput is averaged. Older work hardly counts."""
MIN_BUSY_SECONDS = 1.0  # busy time before a throughput is trusted
SENT_SECONDS, SENT_ITEMS = 0.25, 8
"""Requests wait in a router while every replica has this many seconds, and this many items, of this
router's work, which is enough to fill packs and to keep decoding processes busy. More would only
form a queue in the replicas that a small request could not overtake. With 0.15 s an H200 had
pauses."""
UNMEASURED_SECONDS, UNMEASURED_ITEMS = 0.15, 32
"""The same, for replicas that have not measured what an item costs, as on the CPU."""


@dataclass(slots=True, eq=False)
class Reservation:
    """One item, from admission to release."""

    work: Work
    since_seconds: float  # when it was admitted
    replica: str | None = None  # the replica that has it; None: on no replica


@dataclass(slots=True)
class Account:
    """The outstanding work of one replica, as this router knows it."""

    own: int = 0
    """Work of this router."""
    reported: int = 0
    """Work of all routers, as the replica last reported it."""
    peaks: list[int] = field(default_factory=lambda: [0, 0])
    """The maximum of `own` since `peaks_since_seconds`, and in the period before."""
    peaks_since_seconds: float = -math.inf
    others: int = 0
    """Work of other routers when the replica last told this router its load."""
    heard_seconds: float = -math.inf
    """When the replica last did so. Reports do not count."""

    def add(self, amount: int) -> None:
        self.own += amount
        self.peaks[0] = max(self.peaks[0], self.own)

    def hear(self, outstanding: int, now: float) -> None:
        self.others = max(0, outstanding - self.own)
        self.heard_seconds = now

    def load(self, now: float) -> int:
        """The outstanding work of all routers.

        What a replica told this router recently is most accurate. Otherwise its last report counts.
        The report is old, so the maximum that this router had there meanwhile is subtracted.
        Otherwise this router's finished work would count as work of others.
        """
        if now >= self.peaks_since_seconds + REPORT_AGE_SECONDS:
            self.peaks = [self.own, self.peaks[0]]
            self.peaks_since_seconds = now
        if now < self.heard_seconds + REPORT_AGE_SECONDS:
            return self.own + self.others
        return self.own + max(0, self.reported - max(self.peaks))


class Accounts(NamedTuple):
    """The accounts of one replica. Both together give its load in seconds, whatever its speed."""

    patches: Account
    pairs: Account


class Throughput:
    """Work per second of busy time, as an exponential moving average.

    Idle time says nothing about how fast the fleet is, and is left out. With little work the rate
    is below the fleet's best; it rises within seconds as more work waits.
    """

    def __init__(self) -> None:
        self._patches = 0.0
        self._pairs = 0.0
        self._seconds = 0.0
        self._seen = 0.0

    def resume(self, now: float) -> None:
        """Called when work begins again. The idle time before `now` does not count."""
        self._seen = now

    def did(self, work: Work, now: float) -> None:
        """Counts finished work. There must have been work all the time since `resume`."""
        passed = (now - self._seen) / LOOK_BACK_SECONDS
        kept = math.exp(-passed)
        # As if done evenly over the elapsed time, because a lump at its end would weigh too much.
        weight = (1 - kept) / passed if passed else 1
        self._patches = self._patches * kept + work.patches * weight
        self._pairs = self._pairs * kept + work.pairs * weight
        self._seconds = self._seconds * kept + LOOK_BACK_SECONDS * (1 - kept)
        self._seen = now

    def seconds(self, work: Work, cost: Cost | None = None) -> float | None:
        """How long this work takes, judged by its cost, or else by its patches. None: not measured
        yet."""
        patch, pair = (cost.patch_seconds, cost.attention_seconds) if cost else (1, 0)
        done = self._patches * patch + self._pairs * pair
        if self._seconds < MIN_BUSY_SECONDS or not done:
            return None
        return (work.patches * patch + work.pairs * pair) * self._seconds / done


class Ledger:
    """Outstanding patches of one router."""

    def __init__(
        self, limit_patches: int, exclude_seconds: float, queue_seconds: float = math.inf
    ) -> None:
        """Admits patches up to the limit, and while the queue takes at most `queue_seconds`."""
        self.configure(limit_patches, exclude_seconds, queue_seconds)
        self.outstanding = Work(0)
        self._accounts: defaultdict[str, Accounts] = defaultdict(
            lambda: Accounts(Account(), Account())
        )
        self._excluded_until: dict[str, float] = {}
        self._throughput = Throughput()
        self._cost: Cost | None = None
        """Of the first replica that has measured it. It counts only how much more a large image
        costs than a small one."""
        self._sent_patches = 0
        self._sent_items: defaultdict[str, int] = defaultdict(int)
        """Items of this router on each replica."""
        self._turns: dict[str, int] = {}
        """When each replica last got an item of this router, counted in items."""
        self._assigned = 0
        self._open: dict[Reservation, None] = {}
        """Reservations that were not released, in the order of admission."""

    def configure(self, limit_patches: int, exclude_seconds: float, queue_seconds: float) -> None:
        """Changes the limits from now on."""
        self._limit = limit_patches
        self._exclude_seconds = exclude_seconds
        self._queue_seconds = queue_seconds

    def own(self, replica: str) -> int:
        """Patches that this router has on a replica."""
        accounts = self._accounts.get(replica)
        return accounts.patches.own if accounts else 0

    @property
    def waiting(self) -> int:
        """Patches that were admitted and are on no replica."""
        return self.outstanding.patches - self._sent_patches

    @property
    def waiting_per_sent(self) -> float:
        """Patches that wait per patch that is on a replica."""
        return self.waiting / (self._sent_patches or 1)

    def has_room(self, costs: Mapping[str, Cost | None]) -> bool:
        """Whether any of these replicas needs more work from this router to stay busy."""
        return any(self._needs_more(replica, cost) for replica, cost in costs.items())

    def _needs_more(self, replica: str, cost: Cost | None) -> bool:
        items = self._sent_items.get(replica, 0)
        if cost is None:
            seconds = self._throughput.seconds(Work(self._sent_patches))
            short = seconds is not None and seconds < UNMEASURED_SECONDS
            return short or items < UNMEASURED_ITEMS
        if items < SENT_ITEMS:
            return True
        patches, pairs = self._accounts[replica]
        return cost.work_seconds(Work(patches.own, pairs.own)) < SENT_SECONDS

    def turn(self, replica: str) -> int:
        """Sort key: lower for a replica that has waited longer for an item of this router."""
        return self._turns.get(replica, 0)

    def admit(self, items: Sequence[Work], now: float) -> list[Reservation]:
        """Returns one reservation per item. Admits all items or none.

        Raises TooLarge for a request that could never be admitted, even with nothing in flight.
        Raises Overloaded, with the time after which to retry, if there is no room now or the queue
        is too long. The request's own size does not count towards the queue, because large requests
        would then never be admitted under load.
        """
        work = Work.of(items)
        patches = work.patches
        if patches > self._limit:
            raise TooLarge(
                f"the request has {patches} patches and the router takes {self._limit} at a time; "
                "send fewer or smaller items, or raise router.max_outstanding_patches"
            )
        if patches:
            self.check_room(now, patches)
        if not self.outstanding.patches:
            self._throughput.resume(now)
        self.outstanding = Work.of([self.outstanding, work])
        admitted = [Reservation(item, now) for item in items]
        self._open.update(dict.fromkeys(admitted))
        return admitted

    def check_room(self, now: float, patches: int = 1) -> None:
        """Raises Overloaded if `admit` would for this many patches."""
        excess = self.outstanding.patches + patches - self._limit
        if excess > 0:
            raise Overloaded(
                f"{self.outstanding.patches} of {self._limit} patches are in flight, no room for "
                f"{patches} more; try again later",
                within(self._throughput.seconds(Work(excess))),
            )
        ahead_seconds = self._throughput.seconds(self.outstanding, self._cost) or 0.0
        if ahead_seconds > self._queue_seconds and self._queues(now):
            raise Overloaded(
                f"the queue takes about {ahead_seconds:.0f} s, more than the "
                f"{self._queue_seconds:g} s of router.max_queue_seconds; try again later",
                within(ahead_seconds - self._queue_seconds),
            )

    def assign(self, reservation: Reservation, replica: str | None) -> None:
        """Moves an item to a replica, or away from one. Does nothing once the item is released."""
        if reservation not in self._open:
            return
        if reservation.replica is not None:
            self._move(reservation.replica, reservation.work, -1)
        reservation.replica = replica
        if replica is not None:
            self._assigned += 1
            self._turns[replica] = self._assigned
            self._move(replica, reservation.work, 1)

    def release(self, reservation: Reservation, now: float, *, done: bool) -> None:
        """Releases the patches of an item. A second call does nothing. `done`: they were
        encoded."""
        if reservation not in self._open:
            return
        self.assign(reservation, None)
        del self._open[reservation]
        self.outstanding = self.outstanding.without(reservation.work)
        self._throughput.did(reservation.work if done else Work(0), now)

    def report(self, reported: Mapping[str, Work], costs: Iterable[Cost | None] = ()) -> None:
        """Records the load that each replica reported, and what work costs on the replicas. Forgets
        idle replicas that are gone."""
        self._cost = next(filter(None, costs), None)
        for replica, work in reported.items():
            for account, amount in self._of(replica, work):
                account.reported = amount
        for replica in [r for r in self._accounts if r not in reported and not self.own(r)]:
            del self._accounts[replica]
        for known in (self._excluded_until, self._turns, self._sent_items):
            for replica in known.keys() - self._accounts.keys():
                del known[replica]

    def hear(self, replica: str, outstanding: Work, now: float) -> None:
        """Records the load of all routers, which a replica sent with an answer or on its own.

        Reports alone arrive so late that all routers avoid, and then prefer, the same replicas.
        With eight routers that was worse than no balancing (`simulate --reports-alone`).
        """
        for account, amount in self._of(replica, outstanding):
            account.hear(amount, now)

    def loads(self, replicas: Iterable[str], now: float) -> dict[str, int]:
        """Outstanding patches of all routers on each replica, in the order given."""
        return {replica: self._accounts[replica].patches.load(now) for replica in replicas}

    def groups(
        self, items: Sequence[Work], costs: Mapping[str, Cost | None], now: float
    ) -> list[ReplicaGroup]:
        """The input for a plan of these items over these replicas: in seconds, or in patches if the
        cost of work is unknown for any of the replicas."""
        known = {replica: cost for replica, cost in costs.items() if cost is not None}
        if len(known) < len(costs):
            return [ReplicaGroup([item.patches for item in items], self.loads(costs, now))]
        seconds = {}
        for replica, cost in known.items():
            patches, pairs = self._accounts[replica]
            seconds[replica] = cost.work_seconds(Work(patches.load(now), pairs.load(now)))
        return by_cost(items, known, seconds)

    def exclude(self, replica: str, now: float) -> None:
        """Excludes a replica that just failed from new work."""
        self._excluded_until[replica] = now + self._exclude_seconds

    def excluded(self, replica: str, now: float) -> bool:
        return now < self._excluded_until.get(replica, -math.inf)

    def _move(self, replica: str, work: Work, sign: int) -> None:
        """Moves an item to a replica (1), or away from it (-1)."""
        self._sent_items[replica] += sign
        self._sent_patches += sign * work.patches
        for account, amount in self._of(replica, work):
            account.add(sign * amount)

    def _of(self, replica: str, work: Work) -> Iterable[tuple[Account, int]]:
        """Each account of a replica, with the amount of this work that it counts."""
        return zip(self._accounts[replica], work, strict=True)

    def _queues(self, now: float) -> bool:
        """Whether items really queue: the oldest has waited for a while, and no usable replica is
        idle.

        Otherwise the measured throughput is far below the fleet's best.
        """
        oldest = next(iter(self._open), None)
        if oldest is None or now < oldest.since_seconds + WAITED_FRACTION * self._queue_seconds:
            return False
        sound = [replica for replica in self._accounts if not self.excluded(replica, now)]
        return 0 not in self.loads(sound, now).values()


def tells(costs: Mapping[str, Cost | None]) -> bool:
    """Whether replicas with these costs notify routers at once of each other's items. One replica
    does not, because then routers have nothing to choose."""
    if not 1 < len(costs) <= TOLD_REPLICAS:
        return False
    measured = (cost.seconds([TOLD_PATCHES]) for cost in costs.values() if cost)
    return min(measured, default=TOLD_SECONDS) >= TOLD_SECONDS


def by_cost(
    items: Sequence[Work], costs: Mapping[str, Cost], loads: Mapping[str, float]
) -> list[ReplicaGroup]:
    """Groups the replicas by cost. Their loads are the given seconds plus one launch."""
    groups: defaultdict[Cost, dict[str, float]] = defaultdict(dict)
    for replica, cost in costs.items():
        groups[cost][replica] = loads[replica] + cost.launch_seconds
    return [
        ReplicaGroup([cost.work_seconds(item) for item in items], on) for cost, on in groups.items()
    ]


def within(seconds: float | None) -> float:
    """Seconds that a rejected caller is told to wait."""
    least, most = RETRY_AFTER_SECONDS
    return min(most, max(least, seconds or least))
