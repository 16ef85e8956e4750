"""Plans from sizes: their invariants. That they equal transformers': tests/parity."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from actors.errors import TooLarge
from actors.spec.sizing import (
    MAX_ASPECT,
    CappedSizing,
    EnlargingSizing,
    LinedSizing,
    PackedSizing,
    RoundingSizing,
)
from actors.types import ItemPlan, Size

QWEN = PackedSizing(patch_size=16, merge_size=2, min_pixels=65536, max_pixels=16777216)
TINY = PackedSizing(patch_size=16, merge_size=2, min_pixels=4096, max_pixels=1048576)

sides = st.integers(1, 30_000)


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        (Size(1920, 1080), (1, 68, 120)),
        (Size(336, 336), (1, 20, 20)),  # 10.5 blocks: rounded to even
        (Size(1, 1), (1, 16, 16)),
        (Size(10_000, 10_000), (1, 256, 256)),
    ],
)
def test_known_grids(size: Size, grid: tuple[int, int, int]) -> None:
    tokens = grid[1] * grid[2] // 4
    assert QWEN.plan(size) == ItemPlan(grid, tokens * 4, tokens, (tokens,))


@pytest.mark.parametrize("sizing", [QWEN, TINY], ids=["qwen", "tiny"])
@given(width=sides, height=sides)
def test_no_plan_is_beyond_what_the_tower_prepares_for(
    sizing: PackedSizing, width: int, height: int
) -> None:
    if max(width, height) > MAX_ASPECT * min(width, height):
        with pytest.raises(TooLarge, match=f"{width} x {height}"):
            sizing.plan(Size(width, height))
        return
    plan = sizing.plan(Size(width, height))
    _, rows, columns = plan.grid_thw
    assert rows % 2 == columns % 2 == 0
    assert plan.patches == rows * columns == 4 * plan.tokens
    assert max(rows, columns) <= sizing.longest_side_patches()
    assert plan.tokens <= sizing.token_range()[1]


@given(short=st.integers(1, 400), sizing=st.sampled_from([QWEN, TINY]))
def test_the_longest_side_is_bounded_at_the_greatest_aspect(
    short: int, sizing: PackedSizing
) -> None:
    plan = sizing.plan(Size(MAX_ASPECT * short, short))
    assert plan.grid_thw[2] <= sizing.longest_side_patches()


def test_the_bound_is_not_wasteful() -> None:
    # A request may ask for images as large as the largest budget, which is at most four times the
    # checkpoint's largest image. 200:1 at 67.1 million pixels is 115,853 pixels long.
    assert QWEN.longest_side_patches() < 115_853 / 16 * 1.1


def test_budgets_begin_at_64_tokens_or_below() -> None:
    assert QWEN.token_range() == (64, 16384)
    assert PackedSizing(16, 2, 1024, 32 * 1024).token_range() == (32, 32)
    assert PackedSizing(16, 2, 1, 10).token_range() == (1, 1), "an image has a token at least"
    assert PackedSizing(16, 2, 10, 10).token_range() == (2, 2), "a thin one is enlarged"


@given(
    kind=st.sampled_from([PackedSizing, EnlargingSizing, RoundingSizing, LinedSizing]),
    side=st.sampled_from([14, 16]),
    merge=st.sampled_from([1, 2]),
    tokens=st.floats(MAX_ASPECT, 4096),
    share=st.floats(0, 1),
    short=st.integers(1, 2000),
    aspect=st.floats(1, MAX_ASPECT),
)
# 200 x 1 blocks, but as floats both sides are slightly longer.
@example(PackedSizing, 14, 2, 200.0, 1.0, 19, 200.0)
def test_no_image_has_more_tokens_than_the_largest(
    kind: type[PackedSizing],
    side: int,
    merge: int,
    tokens: float,
    share: float,
    short: int,
    aspect: float,
) -> None:
    """However near the smallest and the largest number of pixels are."""
    pixels = int(tokens * (side * merge) ** 2)
    sizing = kind(side, merge, max(1, int(share * pixels)), pixels)
    for size in (Size(int(short * aspect), short), Size(short, int(short * aspect))):
        with suppress(TooLarge):
            assert sizing.plan(size).path_tokens[0] <= sizing.largest_tokens()


KIMI = CappedSizing(patch_size=14, merge_size=2, max_patches=4096, max_side_patches=512)


@given(width=st.integers(1, 9000), height=st.integers(1, 9000))
def test_a_capped_image_is_within_the_bounds_whatever_its_shape(width: int, height: int) -> None:
    try:
        plan = KIMI.plan(Size(width, height))
    except TooLarge:
        assert max(width, height) > 14 * 510
        return
    assert plan.tokens <= KIMI.token_range()[1]
    assert max(plan.grid_thw) <= KIMI.longest_side_patches() == 510
    resized = KIMI.resized(Size(width, height))
    assert (resized == Size(width, height)) == ((width // 14) * (height // 14) <= 4096)


def test_the_bound_of_capped_images_is_not_far() -> None:
    sizes = [Size(482 * 14 + 13, side) for side in range(14, 400)]
    most = max(KIMI.plan(size).tokens for size in sizes)
    assert 0.95 * KIMI.token_range()[1] < most


def test_a_short_side_is_enlarged_to_a_block_first() -> None:
    sizing = EnlargingSizing(14, 2, min_pixels=6272, max_pixels=4816896)
    assert sizing.resized(Size(14, 2000)) == Size(28, 4004)
    assert PackedSizing(14, 2, 6272, 4816896).resized(Size(14, 2000)) == Size(28, 952)
