"""Decides which waiting request is sent to the replicas next. Pure."""

from __future__ import annotations

from bisect import insort
from itertools import count
from typing import Generic, TypeVar

Request = TypeVar("Request")


class FairQueue(Generic[Request]):
    """Weighted fair queueing (Demers, Keshav, Shenker, 1989), where each flow is one request.

    Requests are in the order in which they would finish if all of them shared the fleet equally:
    small ones overtake large ones, equal ones keep their order, and none waits forever.
    """

    def __init__(self) -> None:
        self._shared = 0.0
        """How much each waiting request would have received since the start by equal sharing: the
        virtual time."""
        self._number = count()
        self._waiting: list[tuple[float, int, float, Request]] = []
        """Sorted: the virtual time at which a request would finish, its number, its size, and the
        request."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request, size: float) -> None:
        insort(self._waiting, (self._shared + size, next(self._number), size, request))

    def remove(self, request: Request) -> None:
        """Does nothing if the request is not in the queue."""
        self._waiting = [one for one in self._waiting if one[3] != request]

    def __getitem__(self, place: int) -> Request:
        return self._waiting[place][3]

    def pop(self, place: int = 0) -> Request:
        """`place`: later than the first if the requests before it cannot be sent."""
        _, _, size, request = self._waiting[place]
        self._shared += size / len(self._waiting)
        del self._waiting[place]
        return request
