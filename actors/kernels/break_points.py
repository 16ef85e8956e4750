"""Break points: places where a forward pass may be cut into several CUDA graphs (engine/slices.py).

They are between the layers of every tower, and around the launches of long attention
(hopper/attention.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Piece = TypeVar("Piece")

_call: ContextVar[Callable[[], object] | None] = ContextVar("break_points", default=None)


@contextmanager
def at_break_points(call: Callable[[], object]) -> Iterator[None]:
    """Within the context, `call` runs at every break point."""
    token = _call.set(call)
    try:
        yield
    finally:
        _call.reset(token)


def in_use() -> bool:
    """Whether a call runs at break points, so that more of them have a use."""
    return _call.get() is not None


def break_point() -> None:
    call = _call.get()
    if call:
        call()


def between(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Iterates over `pieces`, with a break point between each and the next."""
    for index, piece in enumerate(pieces):
        if index:
            break_point()
        yield piece
