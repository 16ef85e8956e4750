"""Which budgets suit a service's traffic: the ladder with the least padding. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random

import numpy as np
import numpy.typing as npt

from actors.engine.budgets import Capacity, at_least
from actors.engine.packing import smallest_first
from actors.types import ItemPlan

Indices = npt.NDArray[np.intp]

MULTIPLE_TOKENS = 16  # budgets are multiples of this: a GEMM computes whole tiles of rows


def best_ladder(loads: Mapping[int, float], graphs: int, largest: int) -> tuple[int, ...]:
    """At most `graphs` ascending budgets, `largest` the last, that pad the loads least.

    `loads`: tokens of a pack -> how often; none is over `largest`. Exact: dynamic programming over
    the distinct loads, for the best budgets are loads themselves.
    """
    rungs = np.array(sorted({*loads, largest}))
    times = np.array([loads.get(rung, 0.0) for rung in rungs.tolist()])
    packs = np.concatenate(([0.0], times.cumsum()))
    tokens = np.concatenate(([0.0], (times * rungs).cumsum()))
    # best[n]: least padding of the n lowest rungs with this many budgets, the last at rung n.
    best = np.concatenate(([0.0], np.full(len(rungs), np.inf)))
    steps: list[Indices] = []
    for _ in range(min(graphs, len(rungs))):
        below, step = best, np.zeros(len(rungs) + 1, np.intp)
        best = np.full(len(rungs) + 1, np.inf)
        for end, rung in enumerate(rungs, 1):
            padding = rung * (packs[end] - packs[:end]) - (tokens[end] - tokens[:end])
            step[end] = np.argmin(below[:end] + padding)
            best[end] = below[step[end]] + padding[step[end]]
        steps.append(step)
    end, ladder = len(rungs), []
    for step in reversed(steps):
        ladder.append(int(rungs[end - 1]))
        end = int(step[end])
    return tuple(reversed(ladder))


def padding_ratio(loads: Mapping[int, float], budgets: Sequence[int]) -> float:
    """Tokens of padding per token of content; the largest budget holds every load."""
    content = sum(load * times for load, times in loads.items())
    return computed(loads, budgets) / content - 1 if loads else 0.0


def computed(loads: Mapping[int, float], budgets: Sequence[int]) -> float:
    """Tokens of all packs, padding included."""
    return sum((at_least(budgets, load) or load) * times for load, times in loads.items())


def rounded_up(
    loads: Mapping[int, float], largest: int, multiple: int = MULTIPLE_TOKENS
) -> dict[int, float]:
    """The loads rounded up to multiples, at most `largest`: what budgets are chosen from."""
    rounded: dict[int, float] = {}
    for load, times in loads.items():
        whole = min(-(-load // multiple) * multiple, largest)
        rounded[whole] = rounded.get(whole, 0.0) + times
    return rounded


def simulated_loads(
    items: Mapping[ItemPlan, float], waiting_items: float, capacity: Capacity, rounds: int = 5000
) -> list[dict[int, float]]:
    """Tokens on each path of the packs that form when `waiting_items` items wait on average.

    The number of waiting items is geometric, as in a queue, so one item alone always occurs.
    `items`: how often each comes. Deterministic. Items beyond the largest budget run eagerly and do
    not count, nor does a path on which a pack has no tokens.
    """
    waiting = np.random.default_rng(0).geometric(1 / waiting_items, rounds)
    drawn = Random(0).choices(list(items), list(items.values()), k=int(waiting.sum()))
    loads: list[Counter[int]] = [Counter() for _ in capacity.tokens]
    start = 0
    for count in waiting.tolist():
        plans = drawn[start : start + count]
        start += count
        for pack in smallest_first(plans, capacity):
            if None in pack.budgets:
                continue
            for path, load in enumerate(loads):
                if tokens := sum(plans[i].path_tokens[path] for i in pack.items):
                    load[tokens] += 1
    return [dict(load) for load in loads]
