"""Windows of images against transformers' own rule, and the tokens that are published."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.errors import TooLarge
from actors.spec.sizing import MAX_ASPECT, ViewSizing
from actors.spec.views import PaddedWindows, WindowSizing
from actors.types import Size
from tests.step3p7 import Processor

STEP37 = WindowSizing(728, 504, 3024, 14, 4)
STEP3 = PaddedWindows(728, 504, 3024, 14, 4)

sides = st.integers(1, 8000) | st.integers(1, 60).map(lambda n: n * 56)


@pytest.mark.parametrize("sizing", [STEP37, STEP3], ids=["step37", "step3"])
@pytest.mark.parametrize(
    ("size", "grid", "crops"),
    [
        (Size(336, 336), (1, 52, 52), 0),
        (Size(1920, 1080), (1, 72, 144), 8),
        (Size(1654, 2339), (1, 180, 144), 20),
        (Size(728, 400), (1, 36, 72), 2),
        (Size(3024, 3024), (1, 216, 216), 36),
    ],
)
def test_published_tokens(
    sizing: ViewSizing, size: Size, grid: tuple[int, int, int], crops: int
) -> None:
    plan = sizing.plan(size)
    assert plan.grid_thw == grid
    assert plan.path_tokens == (169, 81 * crops)
    assert plan.path_patches == (52**2, crops * 36**2)
    assert (plan.tokens, plan.patches) == (sum(plan.path_tokens), sum(plan.path_patches))
    assert sizing.view_tokens == (169, 81)


@given(width=sides, height=sides)
def test_windows_are_those_of_transformers(width: int, height: int) -> None:
    if max(width, height) > MAX_ASPECT * min(width, height):
        with pytest.raises(TooLarge, match=f"{width} x {height}"):
            STEP37.windows(Size(width, height))
        return
    windows = STEP37.windows(Size(width, height))
    assert (windows.rows, windows.columns) == Processor(728, 504, 3024).plan(width, height)


@given(width=sides, height=sides, sizing=st.sampled_from([STEP37, STEP3]))
def test_no_image_is_beyond_the_bound(width: int, height: int, sizing: WindowSizing) -> None:
    if max(width, height) <= MAX_ASPECT * min(width, height):
        smallest, largest = sizing.token_range()
        assert smallest <= sizing.plan(Size(width, height)).tokens <= largest


def test_a_rest_of_a_fifth_is_where_the_two_rules_part() -> None:
    # 726 / 330 is 2.2, and 2.2 - 2 is a little more than 0.2 in binary.
    assert STEP37.plan(Size(726, 330)).path_tokens == (169, 2 * 81)
    assert STEP3.plan(Size(726, 330)).path_tokens == (169, 3 * 81)
