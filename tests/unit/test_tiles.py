"""The table of tiles: every query row of every segment once, whatever the layout."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.kernels.tiles import LONG_PATCHES, Tiles, tile_rows, tile_table

LENGTHS = st.lists(st.integers(1, 700), min_size=1, max_size=30)


def covered(table: list[list[int]], rows: int) -> list[tuple[int, int, int]]:
    """(first query row, segment start, segment end) of each tile, as the kernel reads them."""
    used = table[0][0]
    return [
        (start + (tile - first) * rows, start, end)
        for tile, (start, end, first, _) in enumerate(table[1 : 1 + used])
    ]


@given(LENGTHS, st.sampled_from([64, 128]))
def test_each_row_is_in_one_tile_of_its_own_segment(lengths: list[int], rows: int) -> None:
    size = 1 + sum(lengths) // rows + len(lengths)
    seen: dict[int, tuple[int, int]] = {}
    for first, start, end in covered(tile_table(lengths, rows, size).tolist(), rows):
        for row in range(first, min(first + rows, end)):
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
    tiles = Tiles()
    shape, dtype = tiles.inputs(patches, segments)["attention_tiles"]
    table = tiles.metadata(lengths, patches, segments)["attention_tiles"]
    assert (tuple(table.shape), table.dtype) == (shape, dtype)


@given(LENGTHS)
def test_the_longest_segment_starts_first(lengths: list[int]) -> None:
    table = tile_table(lengths, 64, 1 + sum(lengths) // 64 + len(lengths))
    spans = table[1 : 1 + int(table[0, 0])]
    seen = (spans[:, 1] - spans[:, 0]).tolist()
    assert seen == sorted(seen, reverse=True)


def test_small_budgets_have_small_tiles() -> None:
    assert tile_rows(LONG_PATCHES) < tile_rows(LONG_PATCHES + 1)


@given(st.integers(1, 5000), st.integers(1, 500), st.integers(1, 16))
def test_no_table_shrinks_as_budgets_grow(patches: int, more: int, segments: int) -> None:
    small, large = (
        Tiles().inputs(count, segments)["attention_tiles"][0][0]
        for count in (patches, patches + more)
    )
    assert small <= large


def test_no_items_is_no_work() -> None:
    assert torch.equal(tile_table([], 64, 4), torch.zeros(4, 4, dtype=torch.int32))
