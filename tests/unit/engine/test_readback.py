"""Rows that stay on the device and rows that do not, in one pack: each item gets its own."""

from __future__ import annotations

import pytest
import torch

from actors.engine.device import Device, start_readback

TOKENS = (2, 5, 1, 3)


@pytest.mark.parametrize(
    "stays",
    [(False,) * 4, (True,) * 4, (True, False, True, False), (False, True, True, False)],
)
def test_each_item_gets_its_rows(stays: tuple[bool, ...]) -> None:
    packed = torch.arange(13 * 4.0).view(13, 4)  # two rows are padding
    readback = start_readback(Device(), packed, TOKENS, stays)
    expected = [part.clone() for part in packed[:11].split(TOKENS)]
    packed.zero_()  # by the next replay
    for rows, right in zip(readback(), expected, strict=True):
        assert torch.equal(rows, right)
