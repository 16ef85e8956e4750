"""What the packed families share on the host: positions, windows, padding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from actors.media.patchify import cut_blocks
from actors.models.layers.patches import bicubic_taps, places
from actors.spec.sizing import WindowedSizing

WINDOW = 4
SIZING = WindowedSizing(14, 2, 0, 0, WINDOW)


@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (6, 10), (64, 64), (90, 34)])
def test_bicubic_positions_are_torchs(rows: int, columns: int) -> None:
    table = torch.randn(24, 24, 8, generator=torch.Generator().manual_seed(0))
    taps, weights = bicubic_taps(places(rows, columns, 1), rows, columns, 24)
    ours = (table.flatten(0, 1)[taps] * weights[..., None]).sum(1)
    theirs = F.interpolate(table.permute(2, 0, 1)[None], size=(rows, columns), mode="bicubic")
    assert (ours - theirs[0].permute(1, 2, 0).flatten(0, 1)).abs().max() < 1e-4


@given(grids=st.lists(st.tuples(st.integers(1, 70), st.integers(1, 70)), min_size=1, max_size=9))
def test_there_are_never_more_windows_than_the_table_has_room_for(
    grids: list[tuple[int, int]],
) -> None:
    windows = [SIZING.order(2 * rows, 2 * columns)[1] for rows, columns in grids]
    tokens = sum(rows * columns for rows, columns in grids)
    assert sum(map(len, windows)) <= tokens // WINDOW + len(grids)
    assert sum(map(sum, windows)) == tokens
    assert max(map(max, windows)) <= WINDOW**2


def test_windows_follow_each_other() -> None:
    order, sizes = WindowedSizing(14, 2, 0, 0, window=2).order(6, 10)
    assert sizes == [4, 4, 2, 2, 2, 1]
    assert order.tolist() == [0, 1, 5, 6, 2, 3, 7, 8, 4, 9, 10, 11, 12, 13, 14]


def test_padding_is_black_on_the_right_and_below() -> None:
    image = torch.full((3, 30, 29), 200, dtype=torch.uint8)
    patches = cut_blocks(image, patch=14, merge=2)
    assert patches.shape == (16, 588)
    assert int((patches == 200).sum()) == 3 * 30 * 29
    assert patches[:4].min() == 200  # the first block is whole
    assert set(patches[12:].flatten().tolist()) == {0, 200}
