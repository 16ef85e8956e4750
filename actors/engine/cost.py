"""What a pack costs: the measured seconds of its budgets' replays. Pure: measures nothing itself.

A replay computes every row of its budget, so its time depends on the budget and hardly on what is
in it. The exception is attention, quadratic in an item's patches; but an item brings the same
attention to any pack, so it is measured over empty packs and left out of every comparison.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Costs = Sequence[Mapping[int, float]]
"""For each path, the seconds of one replay of each budget; larger budgets never cost less."""


def pack_seconds(budgets: Sequence[int | None], costs: Costs) -> float:
    """Seconds of a pack's replays. A path without a budget, or with one of 0, counts nothing.

    What is beyond every budget runs alone and eagerly, however the other items are packed; what
    has no tokens is skipped.
    """
    return sum(seconds[budget] for budget, seconds in zip(budgets, costs, strict=True) if budget)


def monotone(measured: Mapping[int, float]) -> dict[int, float]:
    """The closest seconds, by least squares, that never fall as budgets grow.

    Noise of a measurement must not make a larger budget look cheaper than a smaller one.
    """
    pools: list[tuple[float, int]] = []  # sum of seconds, number of budgets: means ascend
    for budget in sorted(measured):
        total, count = measured[budget], 1
        while pools and pools[-1][0] * count > total * pools[-1][1]:
            before, several = pools.pop()
            total, count = total + before, count + several
        pools.append((total, count))
    means = [total / count for total, count in pools for _ in range(count)]
    return dict(zip(sorted(measured), means, strict=True))
