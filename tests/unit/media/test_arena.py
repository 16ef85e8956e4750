"""Pieces of an arena: never two in one place, never lost, whatever the order."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from actors.media.arena import ALIGNED_BYTES, Arena, Place

STEPS = st.lists(st.tuples(st.integers(0, 700), st.integers(0, 99)), max_size=80)
"""Bytes to take, and which of those held to give back first (beyond them: none)."""


@given(st.integers(0, 2048), STEPS)
def test_pieces_keep_apart_and_all_comes_back(
    size_bytes: int, steps: list[tuple[int, int]]
) -> None:
    arena = Arena(size_bytes)
    held: list[Place] = []
    for wanted, which in steps:
        if which < len(held):
            arena.give_back(held.pop(which))
        place = arena.take(wanted)
        if place is None:
            assert widest_gap(arena, held) < max(wanted, 1)
            continue
        assert place.end - place.start >= wanted
        assert place.start >= 0
        assert place.end <= arena.size_bytes <= size_bytes
        assert place.start % ALIGNED_BYTES == 0
        assert all(place.end <= other.start or other.end <= place.start for other in held)
        held.append(place)
        assert arena.free_bytes == arena.size_bytes - sum(p.end - p.start for p in held)
    for place in held:
        arena.give_back(place)
    whole = arena.take(arena.size_bytes)
    assert whole == (Place(0, arena.size_bytes) if arena.size_bytes else None), "in one piece"


def widest_gap(arena: Arena, held: list[Place]) -> int:
    """What a place could have at most, found without the arena's own list."""
    edges = [Place(0, 0), *sorted(held), Place(arena.size_bytes, arena.size_bytes)]
    return max(after.start - before.end for before, after in pairwise(edges))


def test_low_places_come_first() -> None:
    arena = Arena(1024)
    first, second = arena.take(64), arena.take(64)
    assert first == Place(0, 64)
    assert second == Place(64, 128)
    arena.give_back(first)
    assert arena.take(65) == Place(128, 256), "what is too small is passed over"
    assert arena.take(1) == first


def test_what_it_can_never_hold_is_known() -> None:
    arena = Arena(1000)
    assert arena.holds(960)
    assert not arena.holds(961)
