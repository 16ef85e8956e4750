"""Which parts of a fixed piece of memory are taken. Pure arithmetic on offsets, for one thread."""

from __future__ import annotations

from bisect import bisect_left, insort

ALIGNMENT = 256
"""Of offsets and sizes, in bytes: whatever a device reads begins where it reads fastest."""


class Blocks:
    """Gaps in the order of their offsets. The first that is large enough is taken."""

    def __init__(self, size_bytes: int) -> None:
        self._gaps: list[tuple[int, int]] = [(0, size_bytes)]
        self._taken: dict[int, int] = {}

    @property
    def taken_bytes(self) -> int:
        """Of all blocks."""
        return sum(self._taken.values())

    def take(self, size_bytes: int) -> int | None:
        """The offset of so many bytes; None: there is no gap so large."""
        size = max(1, -(-size_bytes // ALIGNMENT)) * ALIGNMENT
        for place, (offset, room) in enumerate(self._gaps):
            if room >= size:
                self._gaps[place : place + 1] = [(offset + size, room - size)] * (room > size)
                self._taken[offset] = size
                return offset
        return None

    def give(self, offset: int) -> None:
        """The block that was taken at this offset is free again, one gap with those beside it."""
        size = self._taken.pop(offset)
        after = bisect_left(self._gaps, (offset, 0))
        if after < len(self._gaps) and self._gaps[after][0] == offset + size:
            size += self._gaps.pop(after)[1]
        if after and sum(self._gaps[after - 1]) == offset:
            offset, before = self._gaps.pop(after - 1)
            size += before
        insort(self._gaps, (offset, size))
