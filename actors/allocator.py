"""A first-fit allocator of offsets into memory, and which items share a block. Neither touches the
memory itself."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence

ALIGNMENT_BYTES = 256  # of offsets and sizes: whole cache lines, and fast to read for a GPU


class Allocator:
    """Takes the lowest gap that is large enough, so that memory is only touched when needed.

    Only `give_back` is thread-safe.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self._gaps = [(0, self.size_bytes)]  # offset and size of each, ascending; no two touch
        self._taken: dict[int, int] = {}
        self._returned: deque[int] = deque()

    @property
    def taken_bytes(self) -> int:
        self._free_returned()
        return sum(self._taken.values())

    def fits(self, size_bytes: int) -> bool:
        """Whether a block of this size fits when everything is free."""
        return aligned(size_bytes) <= self.size_bytes

    def take(self, size_bytes: int) -> int | None:
        """The offset of a free block of at least this size; None if there is none now."""
        self._free_returned()
        size = aligned(size_bytes)
        for index, (offset, room) in enumerate(self._gaps):
            if room >= size:
                self._gaps[index : index + 1] = [(offset + size, room - size)] * (room > size)
                self._taken[offset] = size
                return offset
        return None

    def give_back(self, offset: int) -> None:
        """Frees a block that `take` returned, at the next call of another method. Takes no lock,
        because the garbage collector may call it, as a finalizer, in a thread that holds any
        lock."""
        self._returned.append(offset)

    def _free_returned(self) -> None:
        """Merges returned blocks with the gaps next to them."""
        while self._returned:
            offset = self._returned.popleft()
            size = self._taken.pop(offset)
            after = bisect_left(self._gaps, (offset, 0))
            if after < len(self._gaps) and self._gaps[after][0] == offset + size:
                size += self._gaps.pop(after)[1]
            if after and sum(self._gaps[after - 1]) == offset:
                offset, before = self._gaps.pop(after - 1)
                size += before
            insort(self._gaps, (offset, size))


def aligned(size_bytes: int) -> int:
    """The size of a block for this many bytes: at least one unit, so that offsets are unique."""
    return max(1, -(-size_bytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES


def groups(sizes: Sequence[float], most: float) -> list[list[int]]:
    """Consecutive positions whose sizes add up to at most `most`; a larger one is alone."""
    found: list[list[int]] = []
    room = 0.0
    for place, size in enumerate(sizes):
        if not found or size > room:
            found.append([])
            room = most
        found[-1].append(place)
        room -= size
    return found
