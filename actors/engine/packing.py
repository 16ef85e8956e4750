"""Decides which waiting items share a forward pass, by the cost of packs. No torch, no clocks.

A replay computes every row of its budget, so its time depends on the budget and hardly on its
contents. The exception is attention, which is quadratic in an item's patches. It is left out, and
costs are measured over empty packs, because an item adds the same attention to any pack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from actors.engine.budgets import Capacity, at_least
from actors.types import Cost, ItemPlan, Pack, Work

Integers = npt.NDArray[np.int64]

Packing = Callable[[Sequence[ItemPlan], Capacity], list[Pack]]
"""A policy, which divides all items into packs."""

Costs = Sequence[Mapping[int, float]]
"""For each path: budget -> seconds of one replay. Larger budgets never cost less."""

WINDOW = 256  # items per decision, so that planning takes less time than a replay

NANOSECOND = 1e-9  # plans that differ by less are equally good


class OpenPack:
    """A pack under construction, with running totals."""

    def __init__(
        self, capacity: Capacity, items: Sequence[int] = (), plans: Sequence[ItemPlan] = ()
    ) -> None:
        """`items`: indices in `plans` of the items that it starts with."""
        self.capacity = capacity
        self.items: list[int] = []
        self.tokens = [0] * len(capacity.tokens)
        self.frames = 0
        for index in items:
            self.add(index, plans[index])

    def admits(self, plan: ItemPlan) -> bool:
        most = self.capacity
        return (
            len(self.items) < most.items
            and self.frames + plan.frames <= most.frames
            and all(
                held + more <= limit
                for held, more, limit in zip(
                    self.tokens, plan.path_tokens, most.tokens, strict=True
                )
            )
        )

    def add(self, index: int, plan: ItemPlan) -> None:
        """Adds the item, whether it fits or not."""
        self.items.append(index)
        self.frames += plan.frames
        for path, more in enumerate(plan.path_tokens):
            self.tokens[path] += more

    def close(self) -> Pack:
        """The pack, with the smallest budget of each path that holds it. None: no budget does."""
        budgets = self.capacity.budgets
        if self.frames > self.capacity.frames:
            return Pack(tuple(self.items), (None,) * len(budgets))
        needed = [self.capacity.needed(tokens, self.frames) for tokens in self.tokens]
        return Pack(tuple(self.items), tuple(map(at_least, budgets, needed)))


def smallest_first(plans: Sequence[ItemPlan], capacity: Capacity) -> list[Pack]:
    """Packs all items in ascending order of tokens, filling packs while every limit holds (vLLM, PR
    35963). An item that exceeds a limit by itself gets its own pack, with None for that path."""
    packs: list[Pack] = []
    pack = OpenPack(capacity)
    for index in sorted(range(len(plans)), key=lambda i: plans[i].tokens):
        plan = plans[index]
        if not pack.admits(plan):
            alone = OpenPack(capacity)
            if not alone.admits(plan):
                alone.add(index, plan)
                packs.append(alone.close())
                continue
            packs.append(pack.close())
            pack = alone
        pack.add(index, plan)
    if pack.items:
        packs.append(pack.close())
    return packs


def least_cost(plans: Sequence[ItemPlan], capacity: Capacity, costs: Costs) -> list[Pack]:
    """Packs all items so that replays take the least time, among all ways to cut the sorted list.

    Sorts by tokens like `smallest_first`, and never costs more. A batch is cut in two where two
    smaller graphs cost less than one larger graph with more padding. On a tie, fewer packs win. An
    item that exceeds a limit by itself gets its own pack, with None for that path.
    """
    order = sorted(range(len(plans)), key=lambda i: plans[i].tokens)
    alone = [i for i in order if not graphs_hold(plans[i], capacity)]
    rest = [i for i in order if graphs_hold(plans[i], capacity)]
    cuts = cheapest_cuts([plans[i] for i in rest], capacity, costs)
    packs = [[i] for i in alone] + [rest[a:b] for a, b in pairwise(cuts)]
    return [OpenPack(capacity, pack, plans).close() for pack in packs]


def cheapest_cuts(plans: Sequence[ItemPlan], capacity: Capacity, costs: Costs) -> list[int]:
    """The start of each pack of the cheapest solution, and the end of the last one. Every item must
    fit the graphs by itself.

    Exact, in items x budgets steps: fewer items never cost more, so among the packs that start at
    an item and use a certain budget, only the longest can be part of the cheapest solution. On a
    tie the first pack is the longest, because it has the oldest of equal items, and items to come
    can still join the last one.
    """
    last = len(plans)
    if last < 2:
        return list(range(last + 1))
    frames = running([plan.frames for plan in plans])
    most = np.minimum(np.arange(last) + capacity.items, reach(frames, [capacity.frames])[:, 0])
    ends, seconds = most[:, None], np.zeros(1)
    for path, (budgets, cost) in enumerate(zip(capacity.budgets, costs, strict=True)):
        largest_first = budgets[::-1]
        tokens = running([plan.path_tokens[path] for plan in plans])
        held = np.minimum(
            reach(tokens, largest_first),
            reach(frames, [capacity.frames_in(budget) for budget in largest_first]),
        )
        # One column for each combination of budgets.
        ends = np.minimum(ends[:, :, None], held[:, None, :]).reshape(last, -1)
        # Budget 0: a path without tokens costs nothing.
        path_seconds = np.array([cost[budget] if budget else 0.0 for budget in largest_first])
        seconds = (seconds[:, None] + path_seconds).ravel()
    prices = np.where(ends > np.arange(last)[:, None], seconds, np.inf)
    best, chosen = np.zeros(last + 1), [0] * last
    for begin in reversed(range(last)):
        totals = prices[begin] + best[ends[begin]]
        column = int((totals <= totals.min() + NANOSECOND).argmax())
        best[begin], chosen[begin] = totals[column], int(ends[begin, column])
    cuts = [0]
    while cuts[-1] < last:
        cuts.append(chosen[cuts[-1]])
    return cuts


def running(values: Sequence[int]) -> Integers:
    """Cumulative sums, from 0."""
    return np.concatenate(([0], np.cumsum(values, dtype=np.int64)))


def reach(sums: Integers, limits: Sequence[int]) -> Integers:
    """The latest end of a pack whose sum is within a limit: [first item, limit]."""
    ends: Integers = np.searchsorted(sums, sums[:-1, None] + np.asarray(limits), side="right") - 1
    return ends


def graphs_hold(plan: ItemPlan, capacity: Capacity) -> bool:
    """Whether an item by itself fits a graph of every path."""
    return plan.frames <= capacity.frames and all(
        budgets and tokens <= budgets[-1]
        for tokens, budgets in zip(plan.path_tokens, capacity.budgets, strict=True)
    )


def oldest_first(
    plans: Sequence[ItemPlan], capacity: Capacity, packing: Packing = smallest_first
) -> Pack:
    """The pack with item 0, which has waited longest, so that no item starves.

    The other packs are discarded, because other items will be waiting by the time of the next pack.
    So the policy optimises throughput over all waiting items, and age decides what is next.
    """
    seen = plans[: max(WINDOW, capacity.items)]
    return next(pack for pack in packing(seen, capacity) if 0 in pack.items)


def monotone(measured: Mapping[int, float]) -> dict[int, float]:
    """The measured seconds, made non-decreasing by isotonic regression, so that noise does not make
    a larger budget look cheaper than a smaller one."""
    pools: list[tuple[float, int]] = []  # sum of seconds, number of budgets: means ascend
    for budget in sorted(measured):
        total, count = measured[budget], 1
        while pools and pools[-1][0] * count > total * pools[-1][1]:
            before, several = pools.pop()
            total, count = total + before, count + several
        pools.append((total, count))
    means = [total / count for total, count in pools for _ in range(count)]
    return dict(zip(sorted(measured), means, strict=True))


def fitted(work: Sequence[Work], seconds: Sequence[float]) -> Cost:
    """Fits a cost to the seconds of these packs, by least squares of the relative errors. Where the
    best fit is negative, the attention, the launch or both are set to 0."""
    taken = np.asarray(seconds)
    terms = np.asarray([(1, *each) for each in work], dtype=float) / taken[:, None]
    for used in ([0, 1, 2], [0, 1], [1, 2], [1]):
        if len(used) > len(taken):
            continue
        found = np.zeros(3)
        found[used] = np.linalg.lstsq(terms[:, used], np.ones(len(taken)), rcond=None)[0]
        if (found >= 0).all():
            break
    return Cost(*found.tolist())
