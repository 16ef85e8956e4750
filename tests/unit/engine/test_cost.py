"""The cost model: seconds that never fall as budgets grow; what packing by it gains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.budgets import Capacity, powers_of_two
from actors.engine.packing import (
    Costs,
    Packing,
    fitted,
    least_cost,
    monotone,
    oldest_first,
    smallest_first,
)
from actors.options import ActorOptions
from actors.startup import open_engine
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Cost, ItemPlan, Work

measurements = st.dictionaries(st.integers(0, 16384), st.floats(1e-4, 1.0), max_size=8)


@given(measurements)
def test_seconds_never_fall_and_keep_their_sum(measured: dict[int, float]) -> None:
    smooth = monotone(measured)
    assert list(smooth) == sorted(measured)
    seconds = list(smooth.values())
    assert all(a <= b * (1 + 1e-12) for a, b in pairwise(seconds))
    assert sum(seconds) == pytest.approx(sum(measured.values()))


@given(measurements)
def test_what_is_monotone_is_left_alone(measured: dict[int, float]) -> None:
    ascending = dict(zip(sorted(measured), sorted(measured.values()), strict=True))
    assert monotone(ascending) == pytest.approx(ascending)


def test_noise_is_shared_between_its_neighbours() -> None:
    assert monotone({256: 1.0, 128: 3.0, 64: 1.0, 512: 5.0}) == {64: 1, 128: 2, 256: 2, 512: 5}


@given(st.builds(Cost, st.floats(0, 1e-2), st.floats(1e-7, 1e-4), st.floats(0, 1e-9)))
def test_what_images_take_is_a_launch_their_patches_and_their_attention(cost: Cost) -> None:
    images = [[16] * 256, [16], [256], [4096], [65536]]
    work = [Work.of(Work(one, one * one) for one in pack) for pack in images]
    found = fitted(work, [cost.seconds(pack) for pack in images])
    for pack in (*images, [1024] * 20):
        assert found.seconds(pack) == pytest.approx(cost.seconds(pack), rel=1e-3)


@given(st.lists(st.tuples(st.integers(1, 65536), st.floats(1e-4, 1)), min_size=1, max_size=9))
def test_noise_never_makes_anything_cost_less_than_nothing(
    measured: list[tuple[int, float]],
) -> None:
    cost = fitted([Work(one, one * one) for one, _ in measured], [taken for _, taken in measured])
    assert min(cost.launch_seconds, cost.patch_seconds, cost.attention_seconds) >= 0
    assert cost.seconds([1]) > 0


@pytest.mark.parametrize(
    ("mode", "largest", "measured"),
    [("budget", 64, True), ("exact", 64, False), ("off", 64, False), ("budget", 2, False)],
    ids=["budget", "captured later", "eager", "no image fits"],
)
def test_images_that_graphs_hold_are_measured_at_start(
    mode: str, largest: int, measured: bool
) -> None:
    options = ActorOptions.model_validate(
        {
            "model": {"id": "qwen3vl-tiny", "load_format": "dummy", "dtype": "float32"},
            "encoder": {"device": "cpu", "num_gpus": 0},
            "graphs": {"mode": mode, "token_budgets": [largest]},
        }
    )
    series = EncoderMetrics()
    engine = open_engine(options, series)
    engine.close()
    assert (engine.cost is not None) == measured
    assert ("encoder_measured_seconds{" in series.text()) == measured
    assert series.registry.get_sample_value("encoder_patches_total") == 0, "nothing of a client"


def pack_seconds(budgets: Sequence[int | None], costs: Costs) -> float:
    """Seconds of a pack's replays. A path without a budget, or with one of 0, costs nothing."""
    return sum(seconds[budget] for budget, seconds in zip(budgets, costs, strict=True) if budget)


BUDGETS = powers_of_two(64, 16384)
H200_SECONDS = {
    budget: float(
        np.interp(budget, (0, 100, 800, 2000, 16384), (1.1e-3, 1.8e-3, 6.9e-3, 16e-3, 0.126))
    )
    for budget in BUDGETS
}
"""Replays of the Qwen3-VL-8B tower over short segments, measured at 100, 800 and 2000 tokens."""


@pytest.mark.parametrize(
    ("images", "budgets", "saved"),
    [(24, [2048, 512], 0.3), (41, [4096, 128], 0.4), (39, [4096], 0), (20, [2048], 0)],
)
def test_a_batch_is_split_into_two_graphs_where_padding_costs_more(
    images: int, budgets: list[int], saved: float
) -> None:
    capacity = Capacity((BUDGETS,), (BUDGETS[-1],), 256, 0)
    plans = [ItemPlan((1, 20, 20), 400, 100, (100,))] * images
    whole, split = (
        sum(pack_seconds(pack.budgets, (H200_SECONDS,)) for pack in packs)
        for packs in (
            smallest_first(plans, capacity),
            least_cost(plans, capacity, (H200_SECONDS,)),
        )
    )
    packs = least_cost(plans, capacity, (H200_SECONDS,))
    assert [pack.budgets[0] for pack in packs] == budgets
    assert split <= (1 - saved) * whole


def attention_seconds(tokens: int) -> float:
    """What an item's own attention adds there, in whichever pack: 4.3 ms for 1024 tokens."""
    return 4.3e-3 * (tokens / 1024) ** 2


def queued(tokens: list[int], load: float, together: int, packing: Packing) -> list[float]:
    """Seconds that each item waits and computes; requests of `together` items come at random.

    `load`: of what the device could do without padding and launches. Sorted.
    """
    random = Random(1)
    ideal = [n * 7.6e-6 + attention_seconds(n) for n in tokens]
    gap_seconds = together * sum(ideal) / len(ideal) / load
    arrivals, now = [], 0.0
    for number, n in enumerate(tokens):
        now += random.expovariate(1 / gap_seconds) if number % together == 0 else 0.0
        arrivals.append((now, ItemPlan((1, 2, 2 * n), 4 * n, n, (n,))))
    capacity = Capacity((BUDGETS,), (BUDGETS[-1],), 256, 0)
    waiting: list[tuple[float, ItemPlan]] = []
    latencies, now = [], 0.0
    while arrivals or waiting:
        now = now if waiting else max(now, arrivals[0][0])
        while arrivals and arrivals[0][0] <= now:
            waiting.append(arrivals.pop(0))
        pack = oldest_first([plan for _, plan in waiting], capacity, packing)
        now += pack_seconds(pack.budgets, (H200_SECONDS,))
        now += sum(attention_seconds(waiting[i][1].tokens) for i in pack.items)
        latencies += [now - waiting[i][0] for i in pack.items]
        waiting = [each for i, each in enumerate(waiting) if i not in set(pack.items)]
    return sorted(latencies)


def alike(random: Random) -> int:
    return 100


def heavy_tailed(random: Random) -> int:
    return max(64, min(16384, int(random.lognormvariate(5.3, 0.9))))


@pytest.mark.parametrize("size", [alike, heavy_tailed])
@pytest.mark.parametrize(("load", "together"), [(0.3, 1), (0.6, 8), (0.9, 1), (1.2, 8)])
def test_packing_by_cost_answers_sooner(
    size: Callable[[Random], int], load: float, together: int
) -> None:
    random = Random(0)
    tokens = [size(random) for _ in range(1000)]
    greedy = queued(tokens, load, together, smallest_first)
    by_cost = queued(tokens, load, together, partial(least_cost, costs=(H200_SECONDS,)))
    for share in (0.5, 0.99):
        before, after = (each[int(share * len(tokens))] * 1e3 for each in (greedy, by_cost))
        print(f"{size.__name__} {load} {together} p{share:.0%}: {before:.1f} -> {after:.1f} ms")
    assert np.mean(by_cost) <= 1.001 * np.mean(greedy)
    assert by_cost[990] <= 1.02 * greedy[990]
