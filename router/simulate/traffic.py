"""Seeded scenarios for simulation.py: heavy-tailed sizes, random arrivals, bursts, deaths."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from random import Random
from statistics import fmean

from router.simulate.simulation import Cost, Scenario

H200_8B = Cost(launch_seconds=1.23e-3, patch_seconds=1.61e-6, attention_seconds=2.1e-10)
"""Fitted by eye to the budget graphs of Qwen3-VL-8B's tower as of 2026-11-21 16:42 UTC
(BENCHMARKS.md): within 5 % for 1, 8 and 20 images of 336x336, for 1024x1024 and for 1080p."""

MEDIAN_PATCHES = 1000  # about 500 x 500 pixels in patches of 16
SIGMA = 1.1
"""Standard deviation of the logarithm: one image in a hundred has over 12 times the median."""
LEAST_PATCHES, MOST_PATCHES = 64, 16384
ITEMS = (1, 1, 2, 4, 8, 20)  # items per request, equally likely


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
    deaths: int,
    seed: int,
    cost: Cost,
    answers_tell: bool = True,
) -> Scenario:
    """Requests at random times that keep the replicas busy for a fraction `load` of the time.

    `deaths` replicas die at random times of the whole.
    """
    random = Random(seed)
    sizes = drawn(random, requests)
    seconds = fmean(sum(cost.seconds([one]) for one in items) for items in sizes)
    return Scenario(
        replicas=replicas,
        routers=routers,
        arrivals=at_random(random, sizes, load * replicas / seconds),
        cost=cost,
        answers_tell=answers_tell,
        deaths=[
            (random.uniform(0, requests * seconds / (load * replicas)), random.randrange(replicas))
            for _ in range(deaths)
        ],
    )


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
