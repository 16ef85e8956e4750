"""Which waiting items share a forward pass. Pure: knows nothing of torch, clocks or requests."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise, product
from math import inf

from actors.budgets import Capacity, at_least
from actors.cost import Costs, pack_seconds
from actors.types import ItemPlan, Pack

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
    alone = [i for i in order if not graphs_hold(plans[i], capacity)]
    rest = [i for i in order if graphs_hold(plans[i], capacity)]
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
    paths = range(len(capacity.budgets))
    totals = [running(plan.path_tokens[path] for plan in plans) for path in paths]
    frames = running(plan.frames for plan in plans)
    largest_first = [capacity.budgets[path][::-1] for path in paths]
    seconds = [pack_seconds(budgets, costs) for budgets in product(*largest_first)]
    last = len(plans)
    best, ends = [0.0] * (last + 1), [last] * (last + 1)
    for begin in reversed(range(last)):
        most = min(
            begin + capacity.items, bisect_right(frames, frames[begin] + capacity.frames) - 1
        )
        reach = [
            [
                min(
                    bisect_right(total, total[begin] + budget),
                    bisect_right(frames, frames[begin] + capacity.frames_in(budget)),
                )
                - 1
                for budget in budgets
            ]
            for total, budgets in zip(totals, largest_first, strict=True)
        ]
        cheapest = inf
        for stops, cost in zip(product(*reach), seconds, strict=True):
            end = min(most, *stops)
            if end > begin and cost + best[end] < cheapest - NANOSECOND:
                cheapest, ends[begin] = cost + best[end], end
        best[begin] = cheapest
    cuts = [0]
    while cuts[-1] < last:
        cuts.append(ends[cuts[-1]])
    return cuts


def running(values: Iterable[int]) -> list[int]:
    """Sums of the first 0, 1, 2, ... values."""
    return list(accumulate(values, initial=0))


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
