"""Canvases of tiles, against the functions that transformers itself has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.budgets import graduated
from actors.spec.sizing import Sizing
from actors.spec.tiles import PaddedTiles, PartitionedTiles, StretchedTiles
from actors.types import Size
from tests import llama4

INTERNVL = StretchedTiles(tile_pixels=448, patch_size=14, merge_size=2, max_tiles=12, min_tiles=1)
LLAMA4 = PaddedTiles(tile_pixels=336, patch_size=14, merge_size=2, max_tiles=16)

sides = st.integers(1, 20_000) | st.integers(1, 60).map(lambda n: n * 56)


@pytest.mark.parametrize(
    ("sizing", "size", "grid", "tokens"),
    [
        (INTERNVL, Size(336, 336), (1, 32, 32), 256),
        (INTERNVL, Size(1920, 1080), (1, 64, 128), 2304),
        (INTERNVL, Size(1654, 2339), (1, 96, 64), 1792),
        (LLAMA4, Size(336, 336), (1, 24, 24), 144),
        (LLAMA4, Size(1920, 1080), (1, 72, 120), 2304),
        (LLAMA4, Size(1654, 2339), (1, 120, 72), 2304),
    ],
)
def test_published_sizes(
    sizing: Sizing, size: Size, grid: tuple[int, int, int], tokens: int
) -> None:
    plan = sizing.plan(size)
    assert (plan.grid_thw, plan.tokens, plan.path_tokens) == (grid, tokens, (tokens,))
    assert plan.patches == 4 * tokens


@given(width=sides, height=sides, least=st.integers(1, 4), most=st.integers(4, 24))
def test_stretched_canvases_are_those_of_transformers(
    width: int, height: int, least: int, most: int
) -> None:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

    sizing = StretchedTiles(448, 14, 2, most, least)
    columns, rows = get_optimal_tiled_canvas((height, width), (448, 448), least, most)
    assert sizing.layout(Size(width, height)) == (rows, columns)
    assert sizing.resized(Size(width, height)) == Size(448 * columns, 448 * rows)


@given(width=sides, height=sides, most=st.integers(1, 16))
def test_partitions_are_those_of_ovis2(width: int, height: int, most: int) -> None:
    from transformers.models.ovis2.image_processing_pil_ovis2 import get_min_tile_covering_grid

    columns, rows = get_min_tile_covering_grid((height, width), 448, most)
    sizing = PartitionedTiles(448, 14, 2, most)
    assert sizing.layout(Size(width, height)) == (rows, columns)


@given(width=sides, height=sides, most=st.integers(1, 20))
def test_padded_canvases_are_those_of_transformers(width: int, height: int, most: int) -> None:
    canvas = llama4.canvas(width, height, most)
    sizing = PaddedTiles(336, 14, 2, most)
    rows, columns = sizing.layout(Size(width, height))
    assert (336 * rows, 336 * columns) == canvas
    bounds = min(max(height, 336), canvas[0]), min(max(width, 336), canvas[1])
    rows, columns = llama4.functions("llama4")["get_max_res_without_distortion"](
        (height, width), bounds
    )
    assert sizing.resized(Size(width, height)) == Size(max(columns, 1), max(rows, 1))


@pytest.mark.parametrize("sizing", [INTERNVL, LLAMA4], ids=["internvl", "llama4"])
@given(width=sides, height=sides)
def test_every_plan_is_whole_tiles_within_the_range(
    sizing: StretchedTiles | PaddedTiles, width: int, height: int
) -> None:
    plan = sizing.plan(Size(width, height))
    tile, largest = sizing.token_range()
    assert plan.tokens % tile == 0
    assert tile <= plan.tokens <= largest
    _, rows, columns = plan.grid_thw
    overview = sizing.side_patches**2 if rows * columns > sizing.side_patches**2 else 0
    assert plan.patches == rows * columns + overview
    resized = sizing.resized(Size(width, height))
    assert 0 < resized.width <= columns * sizing.patch_size
    assert 0 < resized.height <= rows * sizing.patch_size


def test_budgets_are_whole_tiles() -> None:
    for sizing in (INTERNVL, LLAMA4):
        tile, largest = sizing.token_range()
        for steps in (1, 2, 4, 8):
            assert all(budget % tile == 0 for budget in graduated(tile, largest, steps, tile))
    assert graduated(*INTERNVL.token_range(), 1, 256) == (256, 512, 1024, 2048, 3328)
    assert graduated(*LLAMA4.token_range(), 2, 144) == (
        144,
        288,
        432,
        576,
        864,
        1152,
        1728,
        2304,
        2448,
    )
    assert StretchedTiles(448, 14, 2, 1, 1).token_range() == (256, 256)
