"""Where the rows of a pack go: to the host, or to a place of their own on the device, by item."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.engine.device import Device, Rows


@dataclass(frozen=True, slots=True)
class Landing:
    """Rows of a pack on their way."""

    rows: Mapping[bool, Rows]
    """Those that stay on the device (True), and those that do not, in the order of the items."""
    tokens: Sequence[int]
    """Of each item."""
    stays: Sequence[bool]

    def wait(self) -> list[Tensor]:
        """[tokens, width] of each item. Blocks until they are there."""
        there = {stay: rows.wait() for stay, rows in self.rows.items()}
        found, ends = [], dict.fromkeys(there, 0)
        for tokens, stay in zip(self.tokens, self.stays, strict=True):
            start, ends[stay] = ends[stay], ends[stay] + tokens
            found.append(there[stay][start : ends[stay]])
        return found


def land(device: Device, packed: Tensor, tokens: Sequence[int], stays: Sequence[bool]) -> Landing:
    """Starts it for the rows of a pack's items, [all tokens, width], where `running`."""
    rows: dict[bool, Rows] = {}
    if not any(stays):
        rows[False] = device.read_back(packed)
        return Landing(rows, tokens, stays)
    parts = list(zip(packed[: sum(tokens)].split(list(tokens)), stays, strict=True))
    rows[True] = device.keep([part for part, stay in parts if stay])
    if leaving := [part for part, stay in parts if not stay]:
        rows[False] = device.read_back(torch.cat(leaving))
    return Landing(rows, tokens, stays)
