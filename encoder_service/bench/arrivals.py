"""Open-loop load: random arrivals and bursts, and the same requests in the simulator of router/."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from random import Random
from typing import Any

import numpy as np

from actors.families.registry import read
from actors.types import Size
from encoder_service.bench.load import Callers, Load, balance, scrape, work_between
from encoder_service.bench.mix import Shape
from encoder_service.config import ServiceOptions
from router.policy.balance import POLICIES
from router.simulate import H200_8B, Outcome, Scenario, Simulation, at_random

BURSTS = 5
"""Number of bursts, of which the median is reported."""
SIMULATED_REQUESTS = 4000
"""Requests simulated at random times: more than the benchmark sends, for a stable p99."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """The requests and the fleet, as far as the simulator needs them."""

    options: ServiceOptions
    kinds: list[list[Shape]]
    routers: int
    most_per_second: float
    """Requests per second of the saturated fleet."""

    def patches(self, kinds: list[list[Shape]]) -> list[list[int]]:
        sizing = read(self.options.model).sizing
        known = {shape: sizing.plan(Size(*shape)).patches for kind in kinds for shape in kind}
        return [[known[shape] for shape in kind] for kind in kinds]

    def scenario(self, arrivals: Sequence[tuple[float, Sequence[int]]]) -> Scenario:
        """The scenario, with the costs of an H200 scaled to this fleet's saturated rate."""
        encoder = self.options.encoder
        replicas = encoder.least_replicas
        # Without GPUs all replicas share the one machine.
        sharing = max(1, int(1 / encoder.num_gpus)) if encoder.num_gpus else replicas
        sizes = self.patches(self.kinds)
        seconds = statistics.fmean(sum(H200_8B.seconds([one]) for one in items) for items in sizes)
        scale = math.ceil(replicas / sharing) / (seconds * self.most_per_second)
        cost = H200_8B.times(scale)
        return Scenario(replicas, self.routers, arrivals, cost, sharing=sharing)

    def simulate(self, arrivals: Sequence[tuple[float, Sequence[int]]], seed: int) -> Outcome:
        policy = POLICIES[self.options.router.policy]
        return Simulation(self.scenario(arrivals), policy, seed).run()


def steady(callers: Callers, load: Load, part: float, url: str, traffic: Traffic) -> dict[str, Any]:
    """Measures requests at random times, at a part of the saturated fleet's rate."""
    per_second = part * traffic.most_per_second
    before = scrape(url)
    result = callers.send(
        replace(load, per_second=per_second, concurrency=len(callers.actors), requests=2**31),
        traffic.kinds,
    )
    work = work_between(before, scrape(url))
    p50, p99 = result.percentiles_ms(50, 99)
    sizes = list(islice(cycle(traffic.patches(traffic.kinds)), SIMULATED_REQUESTS))
    outcome = traffic.simulate(at_random(Random(1), sizes, per_second), 1)
    simulated = np.percentile(outcome.latencies_seconds, [50, 99]) * 1e3
    return {
        "steady_requests_per_second": per_second,
        "steady_requests": len(result.answered),
        "steady_errors": dict(result.errors),
        "steady_p50_ms": p50,
        "steady_p99_ms": p99,
        "steady_balance": work.balance,
        "simulated_p50_ms": float(simulated[0]),
        "simulated_p99_ms": float(simulated[1]),
        "simulated_balance": balance(outcome.patches),
    }


def burst(callers: Callers, load: Load, count: int, url: str, traffic: Traffic) -> dict[str, Any]:
    """Measures `count` requests at once, sent to an idle fleet."""
    load = replace(load, concurrency=count, requests=count, seconds=math.inf)
    taken, balances = [], []
    errors: Counter[str] = Counter()
    for _ in range(BURSTS):
        before = scrape(url)
        result = callers.send(load, traffic.kinds)
        taken.append(result.wall_seconds * 1e3)
        balances.append(work_between(before, scrape(url)).balance)
        errors += result.errors
    arrivals = [(0.0, items) for items in traffic.patches(callers.first(load, traffic.kinds))]
    outcomes = [traffic.simulate(arrivals, seed) for seed in range(BURSTS)]
    return {
        "burst_requests": count,
        "burst_errors": dict(errors),
        "burst_ms": statistics.median(taken),
        "burst_balance": statistics.median(balances),
        "simulated_burst_ms": statistics.median(one.makespan_seconds * 1e3 for one in outcomes),
        "simulated_burst_balance": statistics.median(balance(one.patches) for one in outcomes),
    }
