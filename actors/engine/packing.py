"""Which waiting items share a forward pass. Pure: knows nothing of torch, clocks or requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from actors.engine.budgets import Capacity, at_least
from actors.engine.cost import Costs, pack_seconds
from actors.types import ItemPlan, Pack

Integers = npt.NDArray[np.int64]

Packing = Callable[[Sequence[ItemPlan], Capacity], list[Pack]]
"""A policy: cuts all items into packs."""

WINDOW = 256
"""Items that one decision looks at, or a full pack of them: planning may not outlast a replay."""

NANOSECOND = 1e-9
"""Plans whose seconds differ by less are equally good."""


class OpenPack:
    """A pack that still grows, with the running totals that bind it."""

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self.items: list[int] = []
        self.tokens = [0] * len(capacity.tokens)
        self.frames = 0

    def admits(self, plan: ItemPlan) -> bool:
        """Whether every limit still holds with this item: tokens of each path, items, frames."""
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
        """Takes the item in, whether it fits or not."""
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
    """Packs all items: ascending by tokens, adding while every limit holds (vLLM, PR 35963).

    An item beyond a limit by itself gets a pack of its own, with None for the path it is beyond.
    """
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
    An item beyond a limit by itself gets a pack of its own, with None for the path it is beyond.
    """
    order = sorted(range(len(plans)), key=lambda i: plans[i].tokens)
    alone: list[int] = []
    rest: list[int] = []
    for index in order:
        (rest if graphs_hold(plans[index], capacity) else alone).append(index)
    cuts = cheapest_cuts([plans[i] for i in rest], capacity, costs)
    packs = [[i] for i in alone] + [rest[a:b] for a, b in pairwise(cuts)]
    return [closed(pack, plans, capacity) for pack in packs]


def cheapest_cuts(plans: Sequence[ItemPlan], capacity: Capacity, costs: Costs) -> list[int]:
    """Where each pack of the cheapest plan begins, from 0 to the end. Graphs hold every plan.

    Exact, in items x budgets steps: fewer items never cost more, so of all packs that begin at an
    item and take a certain budget, only the longest can be part of the cheapest plan. On a tie the
    first pack is the longest: it is the one of the oldest among equal items, and what remains at
    the end waits for company.
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
        # Each combination of budgets has a column.
        ends = np.minimum(ends[:, :, None], held[:, None, :]).reshape(last, -1)
        path_seconds = np.array([pack_seconds((budget,), (cost,)) for budget in largest_first])
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
    """Sums of the first 0, 1, 2, ... values."""
    return np.concatenate(([0], np.cumsum(values, dtype=np.int64)))


def reach(sums: Integers, limits: Sequence[int]) -> Integers:
    """Where a pack ends at the latest: [items that it may begin at, limits of the sum]."""
    ends: Integers = np.searchsorted(sums, sums[:-1, None] + np.asarray(limits), side="right") - 1
    return ends


def graphs_hold(plan: ItemPlan, capacity: Capacity) -> bool:
    """Whether an item by itself fits a graph of every path."""
    return plan.frames <= capacity.frames and all(
        budgets and tokens <= budgets[-1]
        for tokens, budgets in zip(plan.path_tokens, capacity.budgets, strict=True)
    )


def closed(items: Iterable[int], plans: Sequence[ItemPlan], capacity: Capacity) -> Pack:
    """The pack of these items."""
    pack = OpenPack(capacity)
    for index in items:
        pack.add(index, plans[index])
    return pack.close()


def oldest_first(
    plans: Sequence[ItemPlan], capacity: Capacity, packing: Packing = smallest_first
) -> Pack:
    """The pack that holds item 0, the one that has waited longest: nobody starves.

    The rest of the plan is thrown away: by the time of the next pack, other items wait. So a
    policy decides for throughput (the time of all that waits), and age decides what goes first.
    """
    seen = plans[: max(WINDOW, capacity.items)]
    return next(pack for pack in packing(seen, capacity) if 0 in pack.items)
