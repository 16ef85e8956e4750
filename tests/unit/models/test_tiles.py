"""The tables of tiles: every query row of every segment once, whatever the layout.

Of the Triton kernel in tiles; of the Hopper kernel in tiles, whole segments and parts of either.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.kernels.attention import LONG_PATCHES, TritonAttention, tile_rows, tile_table
from actors.kernels.hopper.attention import (
    GROUPS,
    RINGS,
    STRIP_ROWS,
    HopperAttention,
    Ring,
    item_table,
)
from actors.kernels.hopper.cuda import LoadedKernel

SMALL, LARGE = RINGS[72][0], RINGS[72][-1]
LENGTHS = st.lists(st.integers(1, 1000), min_size=1, max_size=30)
TABLES: dict[str, TritonAttention | HopperAttention] = {
    "attention_tiles": TritonAttention(),
    "attention_items": HopperAttention([LoadedKernel(ctypes.c_void_p(), 0, 0)] * 2, 72),
}
BOTH = pytest.mark.parametrize("name", TABLES)

Covered = list[tuple[int, int, int, int]]
"""(First query row, rows, segment start and end) of each."""


def tiles(lengths: Sequence[int], rows: int) -> Covered:
    """As the Triton kernel reads them."""
    table = tile_table(lengths, rows, most(lengths, rows)).tolist()
    return [
        (start + (tile - first) * rows, rows, start, end)
        for tile, (start, end, first, _) in enumerate(table[1 : 1 + table[0][0]])
    ]


def items(lengths: Sequence[int], crews: int, ring: Ring = SMALL) -> Covered:
    """Of the last of three heads, as attention_loads.cu reads them."""
    table = item_table(lengths, ring, most(lengths, STRIP_ROWS)).tolist()
    (entries, alone, *_), parts = table[0], max(crews // 3, 1)
    strips = -(-alone // parts)
    if 0 < strips <= 8 and strips % (GROUPS * ring.cluster) != 1:  # a segment alone
        entries = parts
        table = [[], *[[*table[1][:3], strips * 65536 + parts]] * parts]
    left = 3 * entries % crews
    share = crews // max(left, 1)
    found = []
    for item in range(3 * entries):
        start, end, first, packed = table[1 + item // 3]
        strips, count = divmod(packed, 65536)
        head, index = divmod(item - 3 * first, count)
        row = start + index * strips * STRIP_ROWS
        strips = max(min(strips, -(-(end - row) // STRIP_ROWS)), 0)
        parts = 1 if item < 3 * entries - left else share
        cuts = [row + strips * part // parts * STRIP_ROWS for part in range(parts + 1)]
        if head == 2:
            found += [(a, b - a, start, end) for a, b in pairwise(cuts) if a < b]
    return found


def most(lengths: Sequence[int], rows: int) -> int:
    """Rows that a table needs."""
    return 1 + sum(lengths) // rows + len(lengths)


@pytest.mark.parametrize(
    ("covered", "rows"),
    [
        (tiles, 64),
        (tiles, 128),
        *((items, crews) for crews in (1, 7, 132)),
        *((partial(items, ring=LARGE), crews) for crews in (1, 7, 66)),
    ],
)
@given(lengths=LENGTHS | st.lists(st.integers(1000, 9000), min_size=1, max_size=2))
def test_each_row_is_in_one_tile_of_its_own_segment(
    covered: Callable[[Sequence[int], int], Covered], rows: int, lengths: list[int]
) -> None:
    seen: dict[int, tuple[int, int]] = {}
    for first, count, start, end in covered(lengths, rows):
        assert start <= first < end
        for row in range(first, min(first + count, end)):
            assert row not in seen
            seen[row] = (start, end)
    begin = 0
    for length in lengths:
        assert all(seen.pop(row) == (begin, begin + length) for row in range(begin, begin + length))
        begin += length
    assert not seen


@BOTH
@given(lengths=LENGTHS, spare=st.integers(0, 5000), more=st.integers(0, 8))
def test_metadata_has_the_shape_of_the_inputs(
    name: str, lengths: list[int], spare: int, more: int
) -> None:
    patches, segments = sum(lengths) + spare, len(lengths) + more
    shape, dtype = TABLES[name].inputs(patches, segments)[name]
    table = TABLES[name].metadata(lengths, patches, segments)[name]
    assert (tuple(table.shape), table.dtype) == (shape, dtype)


@BOTH
@given(patches=st.integers(1, 5000), more=st.integers(1, 500), segments=st.integers(1, 16))
def test_no_table_shrinks_as_budgets_grow(
    name: str, patches: int, more: int, segments: int
) -> None:
    small, large = (
        TABLES[name].inputs(count, segments)[name][0][0] for count in (patches, patches + more)
    )
    assert small <= large


@given(LENGTHS)
def test_the_longest_segment_starts_first(lengths: list[int]) -> None:
    seen = [end - start for _, _, start, end in tiles(lengths, 64)]
    assert seen == sorted(seen, reverse=True)


@given(LENGTHS, st.sampled_from([1, 7, 132]), st.sampled_from([SMALL, LARGE]))
def test_only_segments_that_the_ring_holds_have_long_items(
    lengths: list[int], crews: int, ring: Ring
) -> None:
    for _, rows, start, end in items(lengths, crews, ring):
        kept = end - start <= ring.kept_patches
        assert kept or rows <= GROUPS * ring.cluster * STRIP_ROWS or len(lengths) == 1


def test_one_image_is_cut_for_all_processors() -> None:
    assert [rows for _, rows, _, _ in items([400], 132)] == [STRIP_ROWS] * 7
    assert [rows for _, rows, _, _ in items([4096], 24)] == [8 * STRIP_ROWS] * 8
    assert [rows for _, rows, _, _ in items([4096], 12, LARGE)] == [6 * STRIP_ROWS] * 10 + [256]


def test_small_budgets_have_small_tiles() -> None:
    assert tile_rows(LONG_PATCHES) < tile_rows(LONG_PATCHES + 1)


@pytest.mark.parametrize(("patches", "kept"), [(4095, 80 * 9), (4096, 96 * 8)])
def test_large_budgets_at_head_size_64_have_the_ring_of_long_segments(
    patches: int, kept: int
) -> None:
    attention = HopperAttention([LoadedKernel(ctypes.c_void_p(), 0, 0)] * 2, 64)
    table = attention.metadata([kept, kept + 1], patches, 2)["attention_items"]
    tiles = -(-(kept + 1) // (GROUPS * STRIP_ROWS))
    assert table[0, 0] == tiles + 1


def test_no_items_is_no_work() -> None:
    empty = torch.zeros(4, 4, dtype=torch.int32)
    assert torch.equal(tile_table([], 64, 4), empty)
    assert torch.equal(item_table([], SMALL, 4), empty)
