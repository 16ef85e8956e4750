"""SAM's attention within square windows, against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from actors.families.deepseek_ocr.sam import FastSquareAttention, SquareAttention
from actors.kernels.hopper.attention import VIEW_RINGS
from tests.gpu.compared import difference

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_device")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("side", "window"), [(64, 64), (64, 14), (40, 40), (40, 14), (24, 12)])
def test_windows_of_every_kind(side: int, window: int, dtype: torch.dtype) -> None:
    qkv = torch.randn(2 * side**2, 3, 12, 64, dtype=dtype)
    tables = 0.2 * torch.randn(2, window, window, 64, dtype=dtype)
    expected = SquareAttention(side, tables.float())(qkv.float(), {})
    out = FastSquareAttention(side, tables)(qkv, {})
    assert difference(out, expected) < 8e-3


def views_of(side: int, views: int, heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    qkv = torch.randn(views * side**2, 3, heads, 64, dtype=dtype)
    return qkv, 0.2 * torch.randn(2, side, side, 64, dtype=dtype)


# On 132 SMs, 7 heads of one view of 64x64 and 12 of three of 40x40 leave strips whose keys the
# warpgroups divide among them. 12 heads of one view are split evenly.
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("views", "heads"), [(1, 12), (1, 7), (3, 12)])
@pytest.mark.parametrize("side", VIEW_RINGS)
def test_whole_views_whose_scores_rise(
    side: int, views: int, heads: int, dtype: torch.dtype
) -> None:
    qkv, tables = views_of(side, views, heads, dtype)
    middle = side**2 // 2
    qkv[middle : middle + side, 1] *= 16  # far above the scores of the first block
    expected = SquareAttention(side, tables.float())(qkv.float(), {})
    given = qkv.clone()
    out = FastSquareAttention(side, tables)(given, {})
    assert difference(out, expected) < 8e-3
    assert torch.equal(given[:, 1:], qkv[:, 1:])


@pytest.mark.parametrize("side", VIEW_RINGS)
def test_a_poisoned_view_stays_alone_and_the_same_is_the_same_every_time(side: int) -> None:
    qkv, tables = views_of(side, 3, 7, torch.bfloat16)
    attend, second = FastSquareAttention(side, tables), slice(side**2, 2 * side**2)
    clean = attend(qkv.clone(), {}).clone()
    assert all(torch.equal(attend(qkv.clone(), {}), clean) for _ in range(20))
    qkv[second] = float("nan")
    out = attend(qkv.clone(), {})
    assert out[second].isnan().all()
    assert torch.equal(out[: second.start], clean[: second.start])
    assert torch.equal(out[second.stop :], clean[second.stop :])
