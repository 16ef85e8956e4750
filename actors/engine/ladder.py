"""Finds the budgets with the least padding for a service's traffic. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random

import numpy as np
import numpy.typing as npt

from actors.engine.budgets import Capacity, at_least
from actors.engine.packing import smallest_first
from actors.errors import ConfigError
from actors.spec.sizing import BlockSizing, Sizing, ViewSizing
from actors.types import ItemPlan

Indices = npt.NDArray[np.intp]

MULTIPLE_TOKENS = 16  # budgets are multiples of this: a GEMM computes whole tiles of rows

ROUNDS = 5000  # simulated queues of waiting items
WAITING_ITEMS = 2.0
"""Mean number of items waiting for a pack. Small, because `least_cost` packing splits long queues
to fit small budgets."""


def pack_loads(counts: Mapping[tuple[int, ...], float], room: Capacity) -> list[dict[int, float]]:
    """For each path: tokens of a pack -> how often, for the packs that these items form.

    `counts`: tokens of an item on each path -> how often. Raises ConfigError if no item fits.
    """
    items = {ItemPlan((1, 1, 1), 0, sum(each), each): count for each, count in counts.items()}
    one_graph = replace(room, budgets=tuple((largest,) for largest in room.tokens))
    loads = simulated_loads(items, WAITING_ITEMS, one_graph)
    if not any(loads):
        largest = ", ".join(map(str, room.tokens))
        raise ConfigError(f"no entry fits the largest budget, {largest}")
    return loads


def planned_ladders(
    loads: Sequence[Mapping[int, float]],
    room: Capacity,
    sizing: Sizing,
    graphs: int | None = None,
    unseen: float = 0.0,
) -> list[tuple[int, ...]]:
    """The best budgets of each path, at most `graphs` (None: as many as in `room`), without 0.

    `unseen`: the share of packs to expect at the budgets of `room`, in equal parts.
    """
    if isinstance(sizing, BlockSizing):
        units: tuple[int, ...] = (MULTIPLE_TOKENS,)
    elif isinstance(sizing, ViewSizing):
        units = sizing.view_tokens
    else:
        units = sizing.token_range()[:1]
    if len(room.budgets) > len(units):  # the last path is for texts, which all have one length
        units += (next(filter(None, room.budgets[-1])),)
    ladders = []
    for load, budgets, unit in zip(loads, room.budgets, units, strict=True):
        given = tuple(filter(None, budgets))
        expected = dict(load)
        for budget in given if unseen else ():
            more = unseen * (sum(load.values()) or 1.0) / len(given)
            expected[budget] = expected.get(budget, 0.0) + more
        rounded = rounded_up(expected, given[-1], unit)
        ladders.append(best_ladder(rounded, graphs or len(given), given[-1]))
    return ladders


def best_ladder(loads: Mapping[int, float], graphs: int, largest: int) -> tuple[int, ...]:
    """At most `graphs` ascending budgets, ending with `largest`, that pad the loads least.

    `loads`: tokens of a pack -> how often; none is over `largest`. Exact, by dynamic programming
    over the distinct loads, because the best budgets are loads themselves.
    """
    rungs = np.array(sorted({*loads, largest}))
    times = np.array([loads.get(rung, 0.0) for rung in rungs.tolist()])
    packs = np.concatenate(([0.0], times.cumsum()))
    tokens = np.concatenate(([0.0], (times * rungs).cumsum()))
    # padding[i, n]: total padding of the packs on rungs n to i if their budget is rung i.
    padding = rungs[:, None] * (packs[1:, None] - packs) - (tokens[1:, None] - tokens)
    padding[np.triu_indices_from(padding, 1)] = np.inf
    # best[n]: least padding of the n lowest rungs with this many budgets, the last at the nth rung.
    best = np.concatenate(([0.0], np.full(len(rungs), np.inf)))
    steps: list[Indices] = []
    for _ in range(min(graphs, len(rungs))):
        totals = best + padding
        steps.append(totals.argmin(1))
        best = np.concatenate(([np.inf], totals.min(1)))
    end, ladder = len(rungs), []
    for step in reversed(steps):
        ladder.append(int(rungs[end - 1]))
        end = int(step[end - 1])
    return tuple(reversed(ladder))


def padding_ratio(loads: Mapping[int, float], budgets: Sequence[int]) -> float:
    """Padding tokens per content token. The largest budget must hold every load."""
    content = sum(load * times for load, times in loads.items())
    return computed(loads, budgets) / content - 1 if loads else 0.0


def computed(loads: Mapping[int, float], budgets: Sequence[int]) -> float:
    """Tokens of all packs, padding included."""
    return sum((at_least(budgets, load) or load) * times for load, times in loads.items())


def rounded_up(
    loads: Mapping[int, float], largest: int, multiple: int = MULTIPLE_TOKENS
) -> dict[int, float]:
    """The loads rounded up to multiples, at most `largest`. Budgets are chosen from these."""
    rounded: dict[int, float] = {}
    for load, times in loads.items():
        whole = min(-(-load // multiple) * multiple, largest)
        rounded[whole] = rounded.get(whole, 0.0) + times
    return rounded


def simulated_loads(
    items: Mapping[ItemPlan, float], waiting_items: float, capacity: Capacity
) -> list[dict[int, float]]:
    """For each path: tokens of a pack -> how often, if `waiting_items` items wait on average.

    The number of waiting items has a geometric distribution, as in a queue, so that packs of one
    item always occur. `items`: how often each occurs. Deterministic. Packs beyond the largest
    budget run eagerly and do not count, nor do paths on which a pack has no tokens.
    """
    waiting = np.random.default_rng(0).geometric(1 / waiting_items, ROUNDS)
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
