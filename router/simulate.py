"""A fleet in simulated time: the real policies and ledgers, with replicas that only count seconds.

Pure and seeded; a thousand replicas take seconds. A replica works shard by shard, in the order of
arrival. Not simulated: the network, decoding, packs that form across requests, and the cache.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf, log
from random import Random
from statistics import fmean

from actors.errors import Overloaded
from router.policy.balance import Plan
from router.policy.ledger import Ledger, Reservation

REPORT_PERIOD_SECONDS = 1.0
REPORT_DELAY_SECONDS = 0.3
"""Delay of a report on its way from a replica to the routers."""
MEDIAN_PATCHES = 1000  # about 500 x 500 pixels in patches of 16
SIGMA = 1.1
"""Standard deviation of the logarithm: one image in a hundred has over 12 times the median."""
LEAST_PATCHES, MOST_PATCHES = 64, 16384
ITEMS = (1, 1, 2, 4, 8, 20)  # items per request, equally likely


@dataclass(frozen=True, slots=True)
class Cost:
    """How long a shard takes: its launch, its patches, and the attention within each image."""

    launch_seconds: float
    patch_seconds: float
    attention_seconds: float  # per pair of patches of the same image

    def seconds(self, patches: Sequence[int]) -> float:
        """Of one shard, from the patches of each of its items."""
        return (
            self.launch_seconds
            + sum(patches) * self.patch_seconds
            + sum(one * one for one in patches) * self.attention_seconds
        )


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
    queue_seconds: float = inf
    """`router.max_queue_seconds`."""
    answers_tell: bool = True
    """Replicas report their load with every answer, not only periodically."""
    sharing: int = 1
    """Replicas per device, in the order of their numbers."""


@dataclass(slots=True)
class Outcome:
    latencies_seconds: list[float] = field(default_factory=list)
    """Of every admitted request, until the end of its last item."""
    busy_seconds: list[float] = field(default_factory=list)
    """Of each replica."""
    patches: list[int] = field(default_factory=list)
    """Encoded by each replica."""
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
        return [one.patches for one in self.reservations]


@dataclass(slots=True)
class SharedDevice:
    """Shares its time equally among those of its replicas that have work."""

    left: dict[int, float] = field(default_factory=dict)
    """Device seconds that each busy replica still needs, as of `since`."""
    since: float = 0.0
    turn: int = 0
    """Grows with every change: an end that was foreseen before is void."""

    def pass_to(self, now: float) -> None:
        """Books the work done until now, before something changes."""
        done = (now - self.since) / max(1, len(self.left))
        self.left = {replica: seconds - done for replica, seconds in self.left.items()}
        self.since = now
        self.turn += 1

    def first(self) -> tuple[int, float]:
        """The replica that is done first if nothing changes, and in how many seconds."""
        replica = min(self.left, key=lambda replica: self.left[replica])
        return replica, max(0.0, self.left[replica]) * len(self.left)


class Simulation:
    """Runs one policy through a scenario. `policy` gives each router a plan of its own."""

    def __init__(self, scenario: Scenario, policy: Callable[[Random], Plan], seed: int) -> None:
        self.scenario = scenario
        self.plans = [policy(Random(seed + router)) for router in range(scenario.routers)]
        # Admits any number of patches; excludes nobody, because no replica dies.
        self.ledgers = [Ledger(2**62, 0, scenario.queue_seconds) for _ in self.plans]
        self.names = [str(replica) for replica in range(scenario.replicas)]
        self.queues: list[deque[SimulatedShard]] = [deque() for _ in self.names]
        self.devices = [SharedDevice() for _ in range(-(-scenario.replicas // scenario.sharing))]
        self.outcome = Outcome(
            busy_seconds=[0.0] * scenario.replicas, patches=[0] * scenario.replicas
        )
        self._now = 0.0
        self._left = len(scenario.arrivals)
        """Requests that are not answered yet; reports end with the last."""
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
            reservations = ledger.admit(patches, self._now)
        except Overloaded:
            self.outcome.rejected += 1
            self._left -= 1
            return
        request = SimulatedRequest(router, self._now, len(patches))
        shards = self.plans[router](patches, ledger.loads(self.names, self._now))
        for name, items in shards.items():
            chosen = [reservations[item] for item in items]
            for one in chosen:
                ledger.assign(one, name)
            replica = int(name)
            self.queues[replica].append(SimulatedShard(request, chosen))
            if len(self.queues[replica]) == 1:
                self._begin(replica)

    def _begin(self, replica: int) -> None:
        device = self.devices[replica // self.scenario.sharing]
        device.pass_to(self._now)
        device.left[replica] = self.scenario.cost.seconds(self.queues[replica][0].patches)
        self._foresee(device)

    def _foresee(self, device: SharedDevice) -> None:
        """Schedules its next end, valid as long as nothing changes."""
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
        self.outcome.busy_seconds[replica] += self.scenario.cost.seconds(work.patches)
        self.outcome.patches[replica] += sum(work.patches)
        for one in work.reservations:
            ledger.release(one, self._now, done=True)
        if self.scenario.answers_tell:
            ledger.hear(self.names[replica], outstanding(queue), self._now)
        work.request.left -= len(work.reservations)
        if not work.request.left:
            self.outcome.latencies_seconds.append(self._now - work.request.since)
            self.outcome.makespan_seconds = self._now
            self._left -= 1
        if queue:
            self._begin(replica)

    def _report(self) -> None:
        """What each replica has now reaches the routers a little later."""
        reports = dict(zip(self.names, map(outstanding, self.queues), strict=True))
        self._at(self._now + REPORT_DELAY_SECONDS, lambda: self._hear(reports))
        self._at(self._now + REPORT_PERIOD_SECONDS, self._report)

    def _hear(self, reports: dict[str, int]) -> None:
        for ledger in self.ledgers:
            ledger.report(reports)


def outstanding(queue: deque[SimulatedShard]) -> int:
    return sum(sum(work.patches) for work in queue)


def heavy_tailed(random: Random) -> int:
    """Patches of one image: log-normal, clipped, a multiple of 4."""
    patches = random.lognormvariate(log(MEDIAN_PATCHES), SIGMA)
    return int(min(MOST_PATCHES, max(LEAST_PATCHES, patches))) // 4 * 4


def drawn(random: Random, requests: int) -> list[list[int]]:
    """The patches of each item of this many requests."""
    return [[heavy_tailed(random) for _ in range(random.choice(ITEMS))] for _ in range(requests)]


def steady(
    replicas: int, requests: int, load: float, *, routers: int, seed: int, cost: Cost
) -> Scenario:
    """Requests at random times that keep the replicas busy for a fraction `load` of the time."""
    random = Random(seed)
    sizes = drawn(random, requests)
    seconds = fmean(sum(cost.seconds([one]) for one in items) for items in sizes)
    return Scenario(replicas, routers, at_random(random, sizes, load * replicas / seconds), cost)


def burst(replicas: int, requests: int, *, seed: int, cost: Cost) -> Scenario:
    """All requests at once, through one router: the makespan shows how well the policy packs."""
    sizes = drawn(Random(seed), requests)
    return Scenario(replicas, 1, [(0.0, [one for items in sizes for one in items])], cost)


def at_random(
    random: Random, sizes: Sequence[Sequence[int]], per_second: float
) -> list[tuple[float, Sequence[int]]]:
    """Each request with the second at which it arrives: a Poisson process."""
    arrivals, now = [], 0.0
    for items in sizes:
        now += random.expovariate(per_second)
        arrivals.append((now, items))
    return arrivals
