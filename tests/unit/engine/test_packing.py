"""Both policies: what every plan must hold to, and what each is for."""

from __future__ import annotations

from functools import partial
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.budgets import Capacity
from actors.engine.packing import (
    Costs,
    Packing,
    least_cost,
    oldest_first,
    smallest_first,
)
from actors.types import ItemPlan, Pack
from tests.unit.engine.test_cost import pack_seconds


def plan(*path_tokens: int, frames: int = 0) -> ItemPlan:
    tokens = sum(path_tokens)
    return ItemPlan((max(1, frames), 2, 2 * tokens), 4 * tokens, tokens, path_tokens, frames)


def one_path(*budgets: int, items: int = 100, frames: int = 0) -> Capacity:
    return Capacity((budgets,), (budgets[-1],), items, frames)


def plans(paths: int) -> st.SearchStrategy[list[ItemPlan]]:
    item = st.builds(
        lambda first, rest, frames: plan(first, *rest, frames=frames),
        st.integers(1, 150),
        st.tuples(*[st.integers(0, 150)] * (paths - 1)),
        st.integers(0, 6),
    )
    return st.lists(item, max_size=30)


capacities = st.builds(
    lambda budgets, items, frames: Capacity(
        budgets, tuple(path[-1] for path in budgets), items, frames
    ),
    st.tuples(
        st.sets(st.integers(1, 128), min_size=1, max_size=5).map(lambda s: tuple(sorted(s))),
        st.sets(st.integers(1, 128), max_size=5).map(lambda s: (0, *sorted(s))),
    ),
    st.integers(1, 8),
    st.integers(0, 8),
)


policies = pytest.mark.parametrize("policy", ["smallest_first", "least_cost"])


def costs_of(capacity: Capacity, launch_seconds: float = 1e-3) -> Costs:
    """A launch and so much a token: what graphs roughly cost."""
    return [
        {budget: launch_seconds * (budget > 0) + 1e-5 * budget for budget in budgets}
        for budgets in capacity.budgets
    ]


def packing(policy: str, capacity: Capacity) -> Packing:
    if policy == "smallest_first":
        return smallest_first
    return partial(least_cost, costs=costs_of(capacity))


@policies
@given(items=plans(2), capacity=capacities)
def test_every_item_is_in_exactly_one_pack(
    policy: str, items: list[ItemPlan], capacity: Capacity
) -> None:
    packs = packing(policy, capacity)(items, capacity)
    assert sorted(i for pack in packs for i in pack.items) == list(range(len(items)))


@policies
@given(items=plans(2), capacity=capacities)
def test_no_pack_is_over_a_limit(policy: str, items: list[ItemPlan], capacity: Capacity) -> None:
    for pack in packing(policy, capacity)(items, capacity):
        frames = sum(items[i].frames for i in pack.items)
        assert len(pack.items) <= capacity.items
        assert frames <= capacity.frames or pack.budgets == (None, None)
        for path, budget in enumerate(pack.budgets):
            tokens = sum(items[i].path_tokens[path] for i in pack.items)
            if budget is not None:
                assert tokens <= budget
                assert not [b for b in capacity.budgets[path] if tokens <= b < budget]
            else:  # beyond every budget, which only happens to an item alone
                assert len(pack.items) == 1
                assert frames > capacity.frames or tokens > capacity.tokens[path]


@policies
@given(items=plans(1).filter(len), most=st.integers(1, 5))
def test_the_oldest_item_is_always_served(policy: str, items: list[ItemPlan], most: int) -> None:
    capacity = one_path(16, 64, items=most, frames=4)
    assert 0 in oldest_first(items, capacity, packing(policy, capacity)).items


def total_seconds(packs: list[Pack], costs: Costs) -> float:
    return sum(pack_seconds(pack.budgets, costs) for pack in packs)


@given(plans(2), capacities, st.floats(0, 0.1))
def test_least_cost_is_never_worse(
    items: list[ItemPlan], capacity: Capacity, launch_seconds: float
) -> None:
    costs = costs_of(capacity, launch_seconds)
    greedy = total_seconds(smallest_first(items, capacity), costs)
    assert total_seconds(least_cost(items, capacity, costs), costs) <= greedy + 1e-6


@given(st.lists(st.integers(1, 64), min_size=1, max_size=8), st.integers(1, 4))
def test_least_cost_is_the_best_of_all_cuts(tokens: list[int], most: int) -> None:
    capacity = one_path(8, 24, 64, items=most)
    costs = costs_of(capacity)
    items = [plan(n) for n in sorted(tokens)]

    def seconds(cuts: tuple[int, ...]) -> float:
        total = 0.0
        for begin, end in zip((0, *cuts), (*cuts, len(items)), strict=True):
            content = sum(item.tokens for item in items[begin:end])
            if content > 64 or end - begin > most:
                return float("inf")
            total += costs[0][min(b for b in (8, 24, 64) if b >= content)]
        return total

    best = min(
        seconds(cuts)
        for count in range(len(items))
        for cuts in combinations(range(1, len(items)), count)
    )
    assert total_seconds(least_cost(items, capacity, costs), costs) == pytest.approx(best)


def test_least_cost_splits_where_padding_costs_more() -> None:
    capacity = one_path(64, 128, 256)
    items = [plan(32)] * 5
    cheap, dear = costs_of(capacity, 1e-4), costs_of(capacity, 1e-1)
    assert [p.budgets for p in smallest_first(items, capacity)] == [(256,)]
    assert [p.budgets for p in least_cost(items, capacity, cheap)] == [(128,), (64,)]
    assert [p.budgets for p in least_cost(items, capacity, dear)] == [(256,)]


def test_among_equals_the_oldest_gets_the_fullest_pack() -> None:
    capacity = one_path(64, 128, 256)
    split = partial(least_cost, costs=costs_of(capacity, 1e-4))
    pack = oldest_first([plan(32)] * 5, capacity, split)
    assert pack.items == (0, 1, 2, 3)


def test_one_decision_looks_at_a_bounded_queue() -> None:
    capacity = one_path(64, items=2)
    seen: list[int] = []

    def watched(items: list[ItemPlan], capacity: Capacity) -> list[Pack]:
        seen.append(len(items))
        return smallest_first(items, capacity)

    oldest_first([plan(1)] * 5000, capacity, watched)  # type: ignore[arg-type]
    assert seen == [256]


def test_smallest_first_then_the_smallest_budget_that_fits() -> None:
    packs = smallest_first([plan(60), plan(10), plan(30)], one_path(16, 64))
    assert [(p.items, p.budgets) for p in packs] == [((1, 2), (64,)), ((0,), (64,))]


def test_items_beyond_every_budget_run_alone_and_eagerly() -> None:
    packs = smallest_first([plan(100), plan(10)], one_path(16, 64))
    assert [(p.items, p.budgets) for p in packs] == [((0,), (None,)), ((1,), (16,))]


def test_the_four_outcomes_of_two_paths() -> None:
    capacity = Capacity(((10, 20), (0, 5)), (20, 5), items=1, frames=0)
    packs = smallest_first([plan(10, 5), plan(12, 0), plan(30, 5), plan(30, 9)], capacity)
    budgets = {pack.items[0]: pack.budgets for pack in packs}
    assert budgets == {0: (10, 5), 1: (20, 0), 2: (None, 5), 3: (None, None)}


def test_too_many_frames_never_reach_a_graph() -> None:
    packs = smallest_first([plan(4, frames=3), plan(4, frames=3)], one_path(16, frames=4))
    assert [p.budgets for p in packs] == [(16,), (16,)]
    assert smallest_first([plan(4, frames=5)], one_path(16, frames=4))[0].budgets == (None,)


@policies
@given(items=plans(1))
def test_a_graph_holds_the_frames_of_its_pack(policy: str, items: list[ItemPlan]) -> None:
    capacity = Capacity(((8, 16, 64),), (64,), items=4, frames=16, frame_tokens=4)
    for pack in packing(policy, capacity)(items, capacity):
        frames = sum(items[i].frames for i in pack.items)
        tokens = sum(items[i].tokens for i in pack.items)
        (budget,) = pack.budgets
        if budget is None:
            assert frames > 16 or tokens > 64
        else:
            segments = capacity.segments.of(budget, videos=frames > 0)
            used = frames + sum(not items[i].frames for i in pack.items)
            assert segments == budget or used <= segments
            assert max(tokens, 4 * frames) <= budget
