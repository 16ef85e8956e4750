"""Text as it grows, up to the first stop text. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class StopFilter:
    """Lets through what cannot be the beginning of a stop text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self.held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """What may be shown now. After a stop text, nothing ever."""
        if self.stopped:
            return ""
        self.held += text
        found = [(at + len(stop), at) for stop in self.stops if (at := self.held.find(stop)) >= 0]
        if found:
            self.stopped = True
            _, start = min(found)  # that which is complete first, however the text is cut
            return self._let(start)
        return self._let(len(self.held) - self._beginning())

    def rest(self) -> str:
        """What was held back and turned out to be no stop text: for the end of the answer."""
        return "" if self.stopped else self._let(len(self.held))

    def _let(self, characters: int) -> str:
        shown, self.held = self.held[:characters], self.held[characters:]
        return shown

    def _beginning(self) -> int:
        """Characters at the end that a stop text may begin with."""
        most = max((len(stop) - 1 for stop in self.stops), default=0)
        lengths = range(min(most, len(self.held)), 0, -1)
        return next((n for n in lengths if self.held.endswith(self._starts(n))), 0)

    def _starts(self, length: int) -> tuple[str, ...]:
        return tuple(stop[:length] for stop in self.stops if len(stop) > length)
