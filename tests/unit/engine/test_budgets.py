from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.budgets import at_least, capacity, graduated, powers_of_two
from actors.errors import ConfigError
from actors.options import GraphOptions


def test_powers_of_two_always_include_the_largest() -> None:
    assert powers_of_two(64, 1024) == (64, 128, 256, 512, 1024)
    assert powers_of_two(64, 1000) == (64, 128, 256, 512, 1000)
    assert powers_of_two(64, 64) == (64,)


@given(st.integers(1, 500), st.integers(1, 20_000))
def test_powers_of_two_ascend_and_at_most_double(smallest: int, largest: int) -> None:
    budgets = powers_of_two(smallest, max(smallest, largest))
    assert budgets[-1] == max(smallest, largest)
    assert all(a < b <= 2 * a for a, b in pairwise(budgets))


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 20_000), st.sampled_from([2, 4, 8]))
def test_graduated_budgets_refine_the_doubled_ones(
    unit: int, units: int, largest: int, steps: int
) -> None:
    smallest = unit * units
    largest = max(smallest, largest)
    doubled, budgets = powers_of_two(smallest, largest), graduated(smallest, largest, steps, unit)
    assert set(doubled) <= set(budgets)
    assert list(budgets) == sorted(set(budgets))
    assert all(budget % unit == 0 for budget in budgets[:-1])
    for low, high in pairwise(budgets):
        assert high - low <= low / steps + unit
    assert len(budgets) <= steps * len(doubled)


def test_four_steps_to_a_doubling() -> None:
    tiles = graduated(64, 1024, 4, 64)
    assert tiles == (64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
    assert graduated(64, 256, 4, 8) == (64, 80, 96, 112, 128, 160, 192, 224, 256)
    assert graduated(64, 100, 4, 64) == (64, 100)
    assert graduated(64, 1000, 1, 8) == powers_of_two(64, 1000)


@given(st.lists(st.integers(1, 100), min_size=1, unique=True).map(sorted), st.integers(1, 120))
def test_at_least_is_the_smallest_that_holds(budgets: list[int], tokens: int) -> None:
    assert at_least(budgets, tokens) == min((b for b in budgets if b >= tokens), default=None)


def test_automatic_limits_mean_what_they_mean_in_vllm() -> None:
    made = capacity(GraphOptions(steps_per_doubling=4), (64, 16384), max_frames_per_video=0)
    assert len(made.budgets[0]) == 28
    assert (made.items, made.frames, made.tokens) == (256, 0, (16384,))
    assert capacity(GraphOptions(), (64, 1024), max_frames_per_video=1).frames == 16
    assert capacity(GraphOptions(max_frames_per_batch=0), (64, 128), 8).frames == 0


def test_given_budgets_are_taken_as_they_are() -> None:
    made = capacity(
        GraphOptions(token_budgets=(10, 50), max_vision_items_per_batch=3), (64, 128), 0
    )
    assert (made.budgets, made.items) == (((10, 50),), 3)
    assert made.segments.of(50, videos=True) == 3


def test_one_budget_is_not_one_item() -> None:
    assert capacity(GraphOptions(token_budgets=(1024,)), (64, 16384), 0).items == 16
    assert capacity(GraphOptions(token_budgets=(16, 64)), (64, 1024), 0).items == 4


def test_absurd_budgets_are_refused() -> None:
    assert capacity(GraphOptions(token_budgets=(512,)), (64, 128), 0).tokens == (512,)
    with pytest.raises(ConfigError, match="513 is over 4 times the 128 tokens"):
        capacity(GraphOptions(token_budgets=(513,)), (64, 128), 0)


def test_frames_need_a_model_with_video() -> None:
    with pytest.raises(ConfigError, match="the model takes no video"):
        capacity(GraphOptions(max_frames_per_batch=8), (64, 128), 0)


def test_without_graphs_packs_are_still_bounded() -> None:
    made = capacity(GraphOptions(mode="off"), (64, 128), 0)
    assert (made.budgets, made.tokens) == (((),), (128,))


@pytest.mark.parametrize("budgets", [(20, 10), (10, 10)])
def test_budgets_out_of_order_are_refused(budgets: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="token_budgets must ascend"):
        capacity(GraphOptions(token_budgets=budgets), (64, 128), 0)


def test_frames_do_not_inflate_what_graphs_are_captured_for() -> None:
    made = capacity(GraphOptions(steps_per_doubling=1), (64, 16384), max_frames_per_video=384)
    assert (made.items, made.frames) == (256, 512)  # not 256 x 384
    held = [made.segments.of(budget, videos=True) for budget in made.budgets[0]]
    assert held == [64, 128, 256, 272, 288, 320, 384, 512, 768]
    images = [made.segments.of(budget, videos=False) for budget in made.budgets[0]]
    assert images == [64, 128] + [256] * 7


def test_small_frames_take_a_larger_budget() -> None:
    made = capacity(GraphOptions(), (64, 1024), max_frames_per_video=384)
    assert (made.needed(64, 2), made.needed(64, 3)) == (64, 96)
    assert [made.frames_in(budget) for budget in (64, 1024)] == [2, 32]
