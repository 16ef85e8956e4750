"""EVS: which rows are left, against the published steps written once more with torch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from actors.spec.video import group_tokens, retained_tokens, retention_mask
from actors.types import ItemPlan


def plan(groups: int, rows: int, columns: int) -> ItemPlan:
    """A video whose patches are merged two by two."""
    tokens = groups * rows * columns
    return ItemPlan((groups, 2 * rows, 2 * columns), 4 * tokens, tokens, (tokens,), frames=groups)


def published(rows: torch.Tensor, video: ItemPlan, rate: float) -> torch.Tensor:
    """compute_retention_mask of SGLang's evs_core: bool [tokens]."""
    groups, height, width = video.grid_thw[0], video.grid_thw[1] // 2, video.grid_thw[2] // 2
    grid = rows.view(groups, height, width, -1)
    unlike = 1 - F.cosine_similarity(grid[1:], grid[:-1], dim=-1)
    unlike = torch.cat([torch.full((1, height, width), 255.0), unlike]).flatten()
    order = torch.argsort(unlike, descending=True, stable=True)
    kept = max(height * width, int(height * width * groups * (1 - rate)))
    mask = torch.zeros(len(rows), dtype=torch.bool)
    mask[order[:kept]] = True
    return mask


@given(
    *(st.integers(2, 6), st.integers(1, 4), st.integers(1, 4)),
    *(st.sampled_from([0.1, 0.5, 0.7, 0.9, 0.999]), st.integers(0, 2**31)),
)
def test_as_published(groups: int, rows: int, columns: int, rate: float, seed: int) -> None:
    video = plan(groups, rows, columns)
    values = torch.randn(video.tokens, 8, generator=torch.Generator().manual_seed(seed))
    mask = retention_mask(values.numpy(), video, rate)
    assert mask.tolist() == published(values, video, rate).tolist()
    assert mask.sum() == retained_tokens(video, rate)
    counts = group_tokens(mask, video)
    assert (len(counts), sum(counts)) == (groups, mask.sum())
    assert counts[0] == rows * columns  # the first group is whole


def test_what_stands_still_goes_first() -> None:
    video = plan(3, 1, 4)
    rows = np.random.default_rng(0).normal(size=(3, 4, 16)).astype(np.float32)
    rows[1, :2], rows[2, 0] = rows[0, :2], rows[1, 0]
    mask = retention_mask(rows.reshape(12, 16), video, 0.25).reshape(3, 4)
    assert mask.tolist() == [[True] * 4, [False, False, True, True], [False, True, True, True]]


def test_of_equal_ones_the_earlier_stay() -> None:
    video = plan(4, 1, 2)
    mask = retention_mask(np.ones((8, 4), np.float32), video, 0.5)
    assert mask.tolist() == [True] * 4 + [False] * 4


@pytest.mark.parametrize(
    ("groups", "rate", "kept"),
    [(1, 0.9, 6), (2, 0.9, 6), (10, 0.5, 30), (10, 0.99, 6), (7, 0.3, 29), (5, 0.0, 30)],
)
def test_how_many_are_left(groups: int, rate: float, kept: int) -> None:
    assert retained_tokens(plan(groups, 2, 3), rate) == kept


def test_images_keep_all() -> None:
    image = ItemPlan((1, 4, 4), 16, 4, (4,))
    assert retained_tokens(image, 0.9) == 4


def test_what_ends_a_video_stays() -> None:
    video = plan(3, 1, 4)
    ended = replace(video, tokens=video.tokens + 1, path_tokens=(5 * video.tokens,))
    rows = np.random.default_rng(1).normal(size=(13, 16)).astype(np.float32)
    mask = retention_mask(rows, ended, 0.5)
    assert mask[:12].tolist() == retention_mask(rows[:12], video, 0.5).tolist()
    assert mask[12]
    assert mask.sum() == retained_tokens(ended, 0.5) == retained_tokens(video, 0.5) + 1
    assert group_tokens(mask, ended) == group_tokens(mask[:12], video)
