"""Which waiting items share a forward pass, by what packs cost. Pure: no torch, no clocks.

A replay computes every row of its budget, so its time depends on the budget and hardly on what is
in it. The exception is attention, which is quadratic in an item's patches; but an item brings the
same attention to any pack, so it is left out: costs are measured over empty packs.
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
"""A policy: cuts all items into packs."""

Costs = Sequence[Mapping[int, float]]
"""Of each path: budget -> seconds of one replay. Larger budgets never cost less."""

WINDOW = 256  # items that one decision looks at, so that planning is shorter than a replay

NANOSECOND = 1e-9  # plans that differ by less are equally good


class OpenPack:
    """A pack that still grows, and its running totals."""

    def __init__(
        self, capacity: Capacity, items: Sequence[int] = (), plans: Sequence[ItemPlan] = ()
    ) -> None:
        """`items`: the places in `plans` of those that it holds from the start."""
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
        """The pack, each path with the smallest budget that holds it; None: none does."""
        budgets = self.capacity.budgets
        if self.frames > self.capacity.frames:
            return Pack(tuple(self.items), (None,) * len(budgets))
        needed = [self.capacity.needed(tokens, self.frames) for tokens in self.tokens]
        return Pack(tuple(self.items), tuple(map(at_least, budgets, needed)))


def smallest_first(plans: Sequence[ItemPlan], capacity: Capacity) -> list[Pack]:
    """Packs all items: ascending by tokens, adding while every limit holds (vLLM, PR 35963). An
    item that exceeds a limit by itself gets a pack of its own, with None for that path."""
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
    """Packs all items in the fewest seconds of replay that consecutive cuts can reach.

    Ascending by tokens like `smallest_first`, and never more expensive; but a batch is cut in two
    where two smaller graphs cost less than the padding of one. On a tie, the fewer packs.
    An item that exceeds a limit by itself gets a pack of its own, with None for that path.
    """
    order = sorted(range(len(plans)), key=lambda i: plans[i].tokens)
    alone = [i for i in order if not graphs_hold(plans[i], capacity)]
    rest = [i for i in order if graphs_hold(plans[i], capacity)]
    cuts = cheapest_cuts([plans[i] for i in rest], capacity, costs)
    packs = [[i] for i in alone] + [rest[a:b] for a, b in pairwise(cuts)]
    return [OpenPack(capacity, pack, plans).close() for pack in packs]


def cheapest_cuts(plans: Sequence[ItemPlan], capacity: Capacity, costs: Costs) -> list[int]:
    """Where each pack of the cheapest plan begins, from 0 to the end. Graphs hold every plan.

    Exact, in items x budgets steps: fewer items never cost more, so of all packs that begin at an
    item and use a certain budget, only the longest can be part of the cheapest plan. On a tie the
    first pack is the longest, because it has the oldest of equal items, and the last one can still
    be joined by items to come.
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
        # A path on which a pack has nothing costs nothing.
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
    """The latest end of a pack: [its first item, limits of the sum]."""
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

    The rest of the plan is discarded, because other items will wait by the time of the next pack.
    So the policy plans for throughput (the time of all that waits), and age decides what is next.
    """
    seen = plans[: max(WINDOW, capacity.items)]
    return next(pack for pack in packing(seen, capacity) if 0 in pack.items)


def monotone(measured: Mapping[int, float]) -> dict[int, float]:
    """The closest seconds, by least squares, that never fall as budgets grow: noise must not make a
    larger budget look cheaper than a smaller one."""
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
    """The cost that is closest to the seconds of these packs, in relative terms. Nothing is
    negative: where the best fit is, attention or the launch counts nothing."""
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
