"""How many bytes of requests this process holds. Knows nothing of what they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from actors.errors import Overloaded

Take = Callable[[int], None]
"""Counts so many bytes more. Raises Overloaded where that is too many."""


class Buffered:
    """The bytes of all requests from their arrival to their answer, at most `most_bytes`."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.held_bytes = 0

    @contextmanager
    def hold(self) -> Iterator[Take]:
        """For one request: what it takes is given back at its end."""
        taken = 0

        def take(size_bytes: int) -> None:
            nonlocal taken
            if self.held_bytes + size_bytes > self.most_bytes:
                raise Overloaded(
                    f"requests of {self.most_bytes} bytes are in flight here "
                    "(limits.max_buffered_bytes): come back later"
                )
            self.held_bytes += size_bytes
            taken += size_bytes

        try:
            yield take
        finally:
            self.held_bytes -= taken
