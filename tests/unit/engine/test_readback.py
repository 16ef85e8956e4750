"""Rows that stay on the device, leave it, or leave it in FP8, in one pack."""

from __future__ import annotations

import pytest
import torch

from actors.engine.device import Device, start_readback
from actors.kernels.gemm.fp8 import Fp8Rows, quantised

TOKENS = (2, 5, 1, 3)


@pytest.mark.parametrize("kinds", ["hhhh", "dddd", "dhdh", "hddh", "8888", "8h8h", "h8d8", "d888"])
def test_each_item_gets_its_rows(kinds: str) -> None:
    packed = torch.randn(13, 4)  # two rows are padding
    stays, in_fp8 = ([kind == one for kind in kinds] for one in "d8")
    readback = start_readback(Device(), packed, TOKENS, stays, in_fp8)
    expected = [part.clone() for part in packed[:11].split(TOKENS)]
    packed.zero_()  # by the next replay
    for rows, right, kind in zip(readback(), expected, kinds, strict=True):
        if kind == "8":
            assert isinstance(rows, Fp8Rows)
            rows, right = rows.float(), quantised(right).float()
        assert isinstance(rows, torch.Tensor)
        assert torch.equal(rows, right)
