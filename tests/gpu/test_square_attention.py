"""SAM's attention within square windows, against plain torch."""

from __future__ import annotations

import pytest
import torch

from actors.families.deepseek_ocr.sam import FastSquareAttention, SquareAttention
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
