"""Simulates a fleet: the real policies and ledgers, with replicas that only count seconds.

Pure and seeded. Simulating a thousand replicas takes seconds. A replica works shard by shard, in
the order of arrival. Not simulated: the network, decoding, packs that form across requests, and the
cache.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, cycle, islice
from math import inf, log
from random import Random
from statistics import fmean
from typing import Literal

from actors.errors import Overloaded
from actors.types import Cost, Work
from router.policy.balance import Plan, ReplicaGroup
from router.policy.ledger import Ledger, Reservation, by_cost, tells

REPORT_PERIOD_SECONDS = 1.0
REPORT_DELAY_SECONDS = 0.3
"""Delay of a report on its way from a replica to the routers."""
TOLD_DELAY_SECONDS = 0.002
"""Delay of a replica's notification about other routers' items."""
MEDIAN_PATCHES = 1000  # about 500 x 500 pixels in patches of 16
SIGMA = 1.1
"""Standard deviation of the logarithm: one image in a hundred has over 12 times the median."""
LEAST_PATCHES, MOST_PATCHES = 64, 16384
ITEMS = (1, 1, 2, 4, 8, 20)  # items per request, equally likely


Known = Literal["patches", "seconds", "everything"]

H200_8B = Cost(launch_seconds=1.23e-3, patch_seconds=1.61e-6, attention_seconds=2.1e-10)
"""Fitted by eye to the budget graphs of Qwen3-VL-8B's tower as of 2026-11-21 16:42 UTC
(BENCHMARKS.md): within 5 % for 1, 8 and 20 images of 336x336, for 1024x1024 and for 1080p."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """What happens to the fleet, whatever the policy."""

    replicas: int
    routers: int
    arrivals: Sequence[tuple[float, Sequence[int]]]
    """In order: the second at which each request arrives, and the patches of its items."""
    cost: Cost
    slower: Sequence[float] = (1,)
    """Factors by which the replicas are slower, in turn."""
    known: Known = "seconds"
    """What routers know about the replicas: only patches, also their costs, or how many seconds of
    work each has left."""
    queue_seconds: float = inf
    """`router.max_queue_seconds`."""
    reports_alone: bool = False
    """Replicas send their load only periodically, neither with answers nor as notifications."""
    sharing: int = 1
    """Replicas per device, in the order of their numbers."""


@dataclass(slots=True)
class Outcome:
    latencies_seconds: list[float] = field(default_factory=list)
    """For every admitted request, until the end of its last item."""
    busy_seconds: list[float] = field(default_factory=list)
    """For each replica."""
    patches: list[int] = field(default_factory=list)
    """Patches that each replica encoded."""
    makespan_seconds: float = 0.0
    """When the last item was done."""
    rejected: int = 0

    @property
    def imbalance(self) -> float:
        """Busy time of the busiest replica over the mean."""
        return max(self.busy_seconds) * len(self.busy_seconds) / (sum(self.busy_seconds) or 1.0)


@dataclass(slots=True)
class SimulatedRequest:
    router: int
    since: float
    left: int


@dataclass(frozen=True, slots=True)
class SimulatedShard:
    request: SimulatedRequest
    reservations: Sequence[Reservation]

    @property
    def patches(self) -> list[int]:
        return [one.work.patches for one in self.reservations]


@dataclass(slots=True)
class SharedDevice:
    """Shares its time equally among those of its replicas that have work."""

    left: dict[int, float] = field(default_factory=dict)
    """Device seconds that each busy replica still needs, as of `since`."""
    since: float = 0.0
    turn: int = 0
    """Grows with every change, which invalidates the end that was scheduled before."""

    def left_seconds(self, replica: int, now: float) -> float:
        """Device seconds that a replica still needs for the shard that it has begun."""
        done = (now - self.since) / max(1, len(self.left))
        return self.left[replica] - done if replica in self.left else 0.0

    def pass_to(self, now: float) -> None:
        """Books the work done until now, before something changes."""
        self.left = {replica: self.left_seconds(replica, now) for replica in self.left}
        self.since = now
        self.turn += 1

    def first(self) -> tuple[int, float]:
        """The replica that is done first if nothing changes, and in how many seconds."""
        replica = min(self.left, key=lambda replica: self.left[replica])
        return replica, max(0.0, self.left[replica]) * len(self.left)


class Simulation:
    """Runs one policy through a scenario. `policy` makes a separate plan for each router."""

    def __init__(self, scenario: Scenario, policy: Callable[[Random], Plan], seed: int) -> None:
        self.scenario = scenario
        self.plans = [policy(Random(seed + router)) for router in range(scenario.routers)]
        # Admits any number of patches; excludes nobody, because no replica dies.
        self.ledgers = [Ledger(2**62, 0, scenario.queue_seconds) for _ in self.plans]
        self.names = [str(replica) for replica in range(scenario.replicas)]
        costs = [scenario.cost.times(slower) for slower in scenario.slower]
        self.costs = dict(zip(self.names, cycle(costs)))
        self.tells = not scenario.reports_alone and tells(self.costs)
        self.queues: list[deque[SimulatedShard]] = [deque() for _ in self.names]
        self.devices = [SharedDevice() for _ in range(-(-scenario.replicas // scenario.sharing))]
        self.outcome = Outcome(
            busy_seconds=[0.0] * scenario.replicas, patches=[0] * scenario.replicas
        )
        self._now = 0.0
        self._left = len(scenario.arrivals)
        """Requests that are not answered yet. Reports end with the last one."""
        self._order = count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def run(self) -> Outcome:
        for number, (second, patches) in enumerate(self.scenario.arrivals):
            router = number % len(self.plans)
            self._at(second, lambda r=router, p=patches: self._arrive(r, p))  # type: ignore[misc]
        self._at(REPORT_PERIOD_SECONDS, self._report)
        while self._left:
            self._now, _, event = heapq.heappop(self._events)
            event()
        return self.outcome

    def _at(self, second: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (second, next(self._order), event))

    def _arrive(self, router: int, patches: Sequence[int]) -> None:
        ledger = self.ledgers[router]
        try:
            reservations = ledger.admit([image(one) for one in patches], self._now)
        except Overloaded:
            self.outcome.rejected += 1
            self._left -= 1
            return
        request = SimulatedRequest(router, self._now, len(patches))
        items = [one.work for one in reservations]
        shards = self.plans[router](self._groups(ledger, items))
        for name, places in shards.items():
            chosen = [reservations[place] for place in places]
            for one in chosen:
                ledger.assign(one, name)
            replica = int(name)
            self.queues[replica].append(SimulatedShard(request, chosen))
            self._tell_others(replica, router)
            if len(self.queues[replica]) == 1:
                self._begin(replica)

    def _groups(self, ledger: Ledger, items: Sequence[Work]) -> list[ReplicaGroup]:
        in_turn = sorted(self.names, key=ledger.turn)  # as in the Dispatcher
        if self.scenario.known == "patches":
            return ledger.groups(items, dict.fromkeys(in_turn), self._now)
        if self.scenario.known == "seconds":
            return ledger.groups(items, {name: self.costs[name] for name in in_turn}, self._now)
        left = {name: self._left_seconds(replica) for replica, name in enumerate(self.names)}
        return by_cost(items, self.costs, left)

    def _left_seconds(self, replica: int) -> float:
        device = self.devices[replica // self.scenario.sharing]
        waiting = sum(self._seconds(replica, work) for work in list(self.queues[replica])[1:])
        return waiting + device.left_seconds(replica, self._now)

    def _begin(self, replica: int) -> None:
        device = self.devices[replica // self.scenario.sharing]
        device.pass_to(self._now)
        device.left[replica] = self._seconds(replica, self.queues[replica][0])
        self._foresee(device)

    def _seconds(self, replica: int, work: SimulatedShard) -> float:
        return self.costs[self.names[replica]].seconds(work.patches)

    def _foresee(self, device: SharedDevice) -> None:
        """Schedules the device's next end of a shard, which is valid as long as nothing changes."""
        if device.left:
            (replica, seconds), turn = device.first(), device.turn
            self._at(self._now + seconds, lambda: self._end(device, turn, replica))

    def _end(self, device: SharedDevice, turn: int, replica: int) -> None:
        if device.turn != turn:
            return
        device.pass_to(self._now)
        del device.left[replica]
        self._foresee(device)
        queue = self.queues[replica]
        work = queue.popleft()
        ledger = self.ledgers[work.request.router]
        self.outcome.busy_seconds[replica] += self._seconds(replica, work)
        self.outcome.patches[replica] += sum(work.patches)
        for one in work.reservations:
            ledger.release(one, self._now, done=True)
        if not self.scenario.reports_alone:
            ledger.hear(self.names[replica], outstanding(queue), self._now)
        if not queue:
            self._tell_others(replica, work.request.router)
        work.request.left -= len(work.reservations)
        if not work.request.left:
            self.outcome.latencies_seconds.append(self._now - work.request.since)
            self.outcome.makespan_seconds = self._now
            self._left -= 1
        if queue:
            self._begin(replica)

    def _tell_others(self, replica: int, router: int) -> None:
        """Notifies every other router of the replica's outstanding work, after a delay."""
        if not self.tells:
            return
        name, left = self.names[replica], outstanding(self.queues[replica])

        def hear() -> None:
            for other, ledger in enumerate(self.ledgers):
                if other != router:
                    ledger.hear(name, left, self._now)

        self._at(self._now + TOLD_DELAY_SECONDS, hear)

    def _report(self) -> None:
        """Sends the routers each replica's outstanding work, which arrives a little later."""
        reports = dict(zip(self.names, map(outstanding, self.queues), strict=True))
        self._at(self._now + REPORT_DELAY_SECONDS, lambda: self._hear(reports))
        self._at(self._now + REPORT_PERIOD_SECONDS, self._report)

    def _hear(self, reports: dict[str, Work]) -> None:
        costs = () if self.scenario.known == "patches" else self.costs.values()
        for ledger in self.ledgers:
            ledger.report(reports, costs)


def outstanding(queue: deque[SimulatedShard]) -> Work:
    return Work.of(one.work for shard in queue for one in shard.reservations)


def image(patches: int) -> Work:
    return Work(patches, patches**2)


def heavy_tailed(random: Random) -> int:
    """Patches of one image: log-normal, clipped, a multiple of 4."""
    patches = random.lognormvariate(log(MEDIAN_PATCHES), SIGMA)
    return int(min(MOST_PATCHES, max(LEAST_PATCHES, patches))) // 4 * 4


def drawn(random: Random, requests: int) -> list[list[int]]:
    """The patches of each item of this many requests."""
    return [[heavy_tailed(random) for _ in range(random.choice(ITEMS))] for _ in range(requests)]


def steady(
    replicas: int,
    requests: int,
    load: float,
    *,
    routers: int,
    seed: int,
    cost: Cost,
    slower: Sequence[float] = (1,),
) -> Scenario:
    """Requests at random times that keep the replicas busy for a fraction `load` of the time."""
    random = Random(seed)
    sizes = drawn(random, requests)
    seconds = fmean(sum(cost.seconds([one]) for one in items) for items in sizes)
    speed = sum(1 / each for each in islice(cycle(slower), replicas))
    arrivals = at_random(random, sizes, load * speed / seconds)
    return Scenario(replicas, routers, arrivals, cost, slower)


def burst(
    replicas: int, requests: int, *, seed: int, cost: Cost, slower: Sequence[float] = (1,)
) -> Scenario:
    """All requests at once, through one router: the makespan shows how well the policy packs."""
    sizes = drawn(Random(seed), requests)
    arrivals = [(0.0, [one for items in sizes for one in items])]
    return Scenario(replicas, 1, arrivals, cost, slower)


def at_random(
    random: Random, sizes: Sequence[Sequence[int]], per_second: float
) -> list[tuple[float, Sequence[int]]]:
    """Each request with the second at which it arrives: a Poisson process."""
    arrivals, now = [], 0.0
    for items in sizes:
        now += random.expovariate(per_second)
        arrivals.append((now, items))
    return arrivals
