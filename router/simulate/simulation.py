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
from math import inf
from random import Random

from actors.errors import Overloaded
from router.policy.balance import Plan
from router.policy.ledger import Ledger, Reservation


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


@dataclass(frozen=True, slots=True)
class Scenario:
    """What happens to the fleet, whatever the policy."""

    replicas: int
    routers: int
    arrivals: Sequence[tuple[float, Sequence[int]]]
    """In order: the second at which each request arrives, and the patches of its items."""
    cost: Cost
    limit_patches: int = 2**62
    """Admitted by one router at a time."""
    queue_seconds: float = inf
    """`router.max_queue_seconds`."""
    report_period_seconds: float = 1.0
    report_delay_seconds: float = 0.3
    """Delay of a report on its way from a replica to the routers."""
    answers_tell: bool = True
    """Replicas report their load with every answer, not only periodically."""
    deaths: Sequence[tuple[float, int]] = ()
    """(Second, replica): it loses all its work."""
    restart_seconds: float = 30.0
    exclude_seconds: float = 5.0
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
    replans: int = 0
    """Items that were retried because their replica died."""

    @property
    def imbalance(self) -> float:
        """Busy time of the busiest replica over the mean."""
        return max(self.busy_seconds) * len(self.busy_seconds) / (sum(self.busy_seconds) or 1.0)


@dataclass(slots=True)
class Request:
    router: int
    since: float
    left: int


@dataclass(frozen=True, slots=True)
class SimulatedShard:
    request: Request
    reservations: Sequence[Reservation]

    @property
    def patches(self) -> list[int]:
        return [one.patches for one in self.reservations]


@dataclass(slots=True)
class SimulatedReplica:
    queue: deque[SimulatedShard] = field(default_factory=deque)
    alive: bool = True

    @property
    def outstanding(self) -> int:
        return sum(sum(work.patches) for work in self.queue)


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
        self.ledgers = [
            Ledger(scenario.limit_patches, scenario.exclude_seconds, scenario.queue_seconds)
            for _ in self.plans
        ]
        self.replicas = [SimulatedReplica() for _ in range(scenario.replicas)]
        self.devices = [SharedDevice() for _ in range(-(-scenario.replicas // scenario.sharing))]
        self.outcome = Outcome(
            busy_seconds=[0.0] * scenario.replicas, patches=[0] * scenario.replicas
        )
        self._now = 0.0
        self._left = len(scenario.arrivals)
        """Requests that are not answered yet; reports and deaths end with the last."""
        self._order = count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def run(self) -> Outcome:
        for number, (second, patches) in enumerate(self.scenario.arrivals):
            router = number % len(self.plans)
            self._at(second, lambda r=router, p=patches: self._arrive(r, p))  # type: ignore[misc]
        for second, replica in self.scenario.deaths:
            self._at(second, lambda replica=replica: self._die(replica))  # type: ignore[misc]
        self._at(self.scenario.report_period_seconds, self._report)
        while self._left:
            self._now, _, event = heapq.heappop(self._events)
            event()
        return self.outcome

    def _at(self, second: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (second, next(self._order), event))

    def _arrive(self, router: int, patches: Sequence[int]) -> None:
        try:
            reservations = self.ledgers[router].admit(patches, self._now)
        except Overloaded:
            self.outcome.rejected += 1
            self._left -= 1
            return
        self._send(Request(router, self._now, len(patches)), reservations)

    def _send(self, request: Request, reservations: Sequence[Reservation]) -> None:
        """Plans over the replicas that this router does not exclude; waits where there is none."""
        ledger = self.ledgers[request.router]
        alive = [place for place, member in enumerate(self.replicas) if member.alive]
        if not alive:
            self._at(self._now + 1.0, lambda: self._send(request, reservations))
            return
        sound = [place for place in alive if not ledger.excluded(str(place), self._now)]
        loads = ledger.loads([str(place) for place in sound or alive], self._now)
        shards = self.plans[request.router]([one.patches for one in reservations], loads)
        for replica, items in shards.items():
            chosen = [reservations[item] for item in items]
            for one in chosen:
                ledger.assign(one, replica)
            self._queue(int(replica), SimulatedShard(request, chosen))

    def _queue(self, replica: int, work: SimulatedShard) -> None:
        member = self.replicas[replica]
        member.queue.append(work)
        if len(member.queue) == 1:
            self._begin(replica)

    def _begin(self, replica: int) -> None:
        device = self.devices[replica // self.scenario.sharing]
        device.pass_to(self._now)
        device.left[replica] = self.scenario.cost.seconds(self.replicas[replica].queue[0].patches)
        self._foresee(device)

    def _foresee(self, device: SharedDevice) -> None:
        """Schedules its next end, valid as long as nothing changes."""
        if device.left:
            (replica, seconds), turn = device.first(), device.turn
            self._at(self._now + seconds, lambda: self._end(device, turn, replica))

    def _end(self, device: SharedDevice, turn: int, replica: int) -> None:
        if device.turn == turn:
            self._stop(device, replica)
            self._finish(replica)

    def _stop(self, device: SharedDevice, replica: int) -> None:
        device.pass_to(self._now)
        device.left.pop(replica, None)
        self._foresee(device)

    def _finish(self, replica: int) -> None:
        member = self.replicas[replica]
        work = member.queue.popleft()
        ledger = self.ledgers[work.request.router]
        self.outcome.busy_seconds[replica] += self.scenario.cost.seconds(work.patches)
        self.outcome.patches[replica] += sum(work.patches)
        for one in work.reservations:
            ledger.release(one, self._now, done=True)
        if self.scenario.answers_tell:
            ledger.hear(str(replica), member.outstanding, self._now)
        work.request.left -= len(work.reservations)
        if not work.request.left:
            self.outcome.latencies_seconds.append(self._now - work.request.since)
            self.outcome.makespan_seconds = self._now
            self._left -= 1
        if member.queue:
            self._begin(replica)

    def _die(self, replica: int) -> None:
        """Routers learn of it at once, because their calls fail, and retry its items."""
        member = self.replicas[replica]
        if not member.alive:
            return
        lost, member.queue = member.queue, deque()
        member.alive = False
        self._stop(self.devices[replica // self.scenario.sharing], replica)
        self._at(self._now + self.scenario.restart_seconds, lambda: self._restart(replica))
        for work in lost:
            ledger = self.ledgers[work.request.router]
            ledger.exclude(str(replica), self._now)
            for one in work.reservations:
                ledger.assign(one, None)
            self.outcome.replans += len(work.reservations)
            self._send(work.request, work.reservations)

    def _restart(self, replica: int) -> None:
        self.replicas[replica].alive = True

    def _report(self) -> None:
        """What each replica has now reaches the routers a little later."""
        reports = {
            str(place): member.outstanding
            for place, member in enumerate(self.replicas)
            if member.alive
        }
        self._at(self._now + self.scenario.report_delay_seconds, lambda: self._hear(reports))
        self._at(self._now + self.scenario.report_period_seconds, self._report)

    def _hear(self, reports: dict[str, int]) -> None:
        for ledger in self.ledgers:
            ledger.report(reports)
