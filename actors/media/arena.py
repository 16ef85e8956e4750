"""Memory that is handed out in pieces, first fit: where they lie, and how they come back.

Pure arithmetic over offsets. One thread at a time may call it; it knows no memory and no process.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

ALIGNED_BYTES = 64
"""Of every piece: a line of the processor's cache, so that no two share one."""


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A piece of the memory."""

    start: int
    end: int


class Arena:
    """So many bytes, of which pieces are taken and given back in any order."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes // ALIGNED_BYTES * ALIGNED_BYTES
        self._free = [Place(0, self.size_bytes)]
        """In order; no two touch."""

    @property
    def free_bytes(self) -> int:
        """Of all that is free, in however many pieces."""
        return sum(place.end - place.start for place in self._free)

    def holds(self, size_bytes: int) -> bool:
        """Whether so many could be taken if all were free."""
        return aligned(size_bytes) <= self.size_bytes

    def take(self, size_bytes: int) -> Place | None:
        """At least so many in one piece, as near to the start as can be. None: not now.

        Low places come again and again, so that memory is touched only where it is needed.
        """
        needed = aligned(size_bytes)
        for index, place in enumerate(self._free):
            if place.end - place.start >= needed:
                middle = place.start + needed
                self._free[index : index + 1] = [Place(middle, place.end)] * (middle < place.end)
                return Place(place.start, middle)
        return None

    def give_back(self, place: Place) -> None:
        """What `take` gave; it joins what is free beside it."""
        index = bisect_left(self._free, place)
        start, end, first, last = place.start, place.end, index, index
        if index and self._free[index - 1].end == start:
            first, start = index - 1, self._free[index - 1].start
        if index < len(self._free) and self._free[index].start == end:
            last, end = index + 1, self._free[index].end
        self._free[first:last] = [Place(start, end)]


def aligned(size_bytes: int) -> int:
    """The least size of a place for so many: of none, too, for a place has its own start."""
    return max(1, -(-size_bytes // ALIGNED_BYTES)) * ALIGNED_BYTES
