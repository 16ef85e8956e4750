"""The table of hopper.cu: every query row of every segment once, in a tile or in a strip."""

from __future__ import annotations

import ctypes

import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.kernels.hopper import STRIP_ROWS, TILE_ROWS
from actors.kernels.hopper_tiles import SHORT_PATCHES, HopperTiles, item_rows, item_table
from actors.kernels.nvrtc import Kernel

LENGTHS = st.lists(st.integers(1, 1000), min_size=1, max_size=30)
TILES = HopperTiles(Kernel(ctypes.c_void_p(), 0, 0))


def items(table: list[list[int]]) -> list[tuple[int, int, int, int]]:
    """(first query row, rows, segment start and end) of each, as hopper_items.cu reads them."""
    tiles, strips = table[0][:2]
    found = []
    for at, (start, end, first, count) in enumerate(table[1 : 1 + tiles + strips]):
        if at < tiles:
            found.append((start + (at - first) * TILE_ROWS, TILE_ROWS, start, end))
        else:
            index = -(-(end - start) // STRIP_ROWS) - count + at - first
            found.append((start + index * STRIP_ROWS, STRIP_ROWS, start, end))
    return found


@given(LENGTHS, st.sampled_from([STRIP_ROWS, TILE_ROWS]))
def test_each_row_is_in_one_item_of_its_own_segment(lengths: list[int], rows: int) -> None:
    size = 1 + sum(lengths) // rows + len(lengths)
    seen: dict[int, tuple[int, int]] = {}
    for first, count, start, end in items(item_table(lengths, rows, size).tolist()):
        assert start <= first < end
        for row in range(first, min(first + count, end)):
            assert row not in seen
            seen[row] = (start, end)
    begin = 0
    for length in lengths:
        assert all(seen.pop(row) == (begin, begin + length) for row in range(begin, begin + length))
        begin += length
    assert not seen


@given(LENGTHS, st.integers(0, 5000), st.integers(0, 8))
def test_metadata_has_the_shape_of_the_inputs(lengths: list[int], spare: int, more: int) -> None:
    patches, segments = sum(lengths) + spare, len(lengths) + more
    shape, dtype = TILES.inputs(patches, segments)["attention_items"]
    table = TILES.metadata(lengths, patches, segments)["attention_items"]
    assert (tuple(table.shape), table.dtype) == (shape, dtype)


@given(LENGTHS)
def test_no_tile_is_left_to_one_group(lengths: list[int]) -> None:
    table = item_table(lengths, TILE_ROWS, 1 + sum(lengths) // TILE_ROWS + len(lengths)).tolist()
    for first, rows, _, end in items(table):
        assert rows == STRIP_ROWS or end - first > STRIP_ROWS


def test_small_budgets_are_strips() -> None:
    assert item_rows(SHORT_PATCHES) == STRIP_ROWS
    assert item_rows(SHORT_PATCHES + 1) == TILE_ROWS


@given(st.integers(1, 5000), st.integers(1, 500), st.integers(1, 16))
def test_no_table_shrinks_as_budgets_grow(patches: int, more: int, segments: int) -> None:
    small, large = (
        TILES.inputs(count, segments)["attention_items"][0][0]
        for count in (patches, patches + more)
    )
    assert small <= large


def test_no_items_is_no_work() -> None:
    assert torch.equal(item_table([], STRIP_ROWS, 4), torch.zeros(4, 4, dtype=torch.int32))
