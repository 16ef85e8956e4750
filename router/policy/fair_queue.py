"""Which of the requests that wait is sent to the replicas next. Pure."""

from __future__ import annotations

from bisect import insort
from itertools import count
from typing import Generic, TypeVar

Request = TypeVar("Request")


class FairQueue(Generic[Request]):
    """Weighted fair queueing (Demers, Keshav, Shenker, 1989), where each flow is one request.

    Requests are in the order in which they would end if all of them shared the fleet equally: small
    ones pass large ones, equal ones keep their order, and none waits forever.
    """

    def __init__(self) -> None:
        self._shared = 0.0
        """How much each waiting request would have got since the start, shared equally."""
        self._number = count()
        self._waiting: list[tuple[float, int, float, Request]] = []
        """Sorted: the share at which a request would end, its number, its size, the request."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request, size: float) -> None:
        insort(self._waiting, (self._shared + size, next(self._number), size, request))

    def remove(self, request: Request) -> None:
        """Does nothing if it does not wait."""
        self._waiting = [one for one in self._waiting if one[3] != request]

    def __getitem__(self, place: int) -> Request:
        return self._waiting[place][3]

    def pop(self, place: int = 0) -> Request:
        """`place`: later than the first where those before it cannot be sent."""
        _, _, size, request = self._waiting[place]
        self._shared += size / len(self._waiting)
        del self._waiting[place]
        return request
