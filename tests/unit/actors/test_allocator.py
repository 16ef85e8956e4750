"""Blocks of an allocator: none overlap, none is lost, whatever the order. What shares a block."""

from __future__ import annotations

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from actors.allocator import ALIGNMENT_BYTES, Allocator, groups

SIZE = 20 * ALIGNMENT_BYTES


def rounded(size: int) -> int:
    """What a block of so many bytes takes."""
    return -(-max(size, 1) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def largest_gap(size_bytes: int, taken: dict[int, int]) -> int:
    """Beside the blocks of these offsets and sizes."""
    begins = [*sorted(taken), size_bytes]
    ends = [0, *(offset + rounded(taken[offset]) for offset in sorted(taken))]
    return max(begin - end for begin, end in zip(begins, ends, strict=True))


@given(
    st.integers(0, SIZE),
    st.lists(st.tuples(st.booleans(), st.integers(0, 6 * ALIGNMENT_BYTES)), max_size=80),
)
def test_blocks_are_apart_and_come_back(size_bytes: int, steps: list[tuple[bool, int]]) -> None:
    allocator = Allocator(size_bytes)
    usable = allocator.size_bytes
    assert usable <= size_bytes
    taken: dict[int, int] = {}
    for give, number in steps:
        if give and taken:
            offset = list(taken)[number % len(taken)]
            allocator.give_back(offset)
            del taken[offset]
            continue
        found = allocator.take(number)
        assert (found is None) == (rounded(number) > largest_gap(usable, taken))
        if found is None:
            continue
        assert found % ALIGNMENT_BYTES == 0
        assert found + number <= usable
        for other, size in taken.items():
            assert found + max(number, 1) <= other or other + max(size, 1) <= found
        taken[found] = number
        assert allocator.taken_bytes == sum(map(rounded, taken.values()))
    for offset in taken:
        allocator.give_back(offset)
    assert allocator.taken_bytes == 0
    assert allocator.take(usable) == (0 if usable else None), "gaps that touch are one"


def test_the_lowest_gap_comes_first() -> None:
    allocator = Allocator(SIZE)
    assert [allocator.take(1), allocator.take(1)] == [0, ALIGNMENT_BYTES]
    allocator.give_back(0)
    assert allocator.take(ALIGNMENT_BYTES + 1) == 2 * ALIGNMENT_BYTES, "too small: passed over"
    assert allocator.take(1) == 0


def test_what_is_full_says_so_until_there_is_room() -> None:
    allocator = Allocator(SIZE)
    assert (allocator.take(SIZE // 2), allocator.take(SIZE // 2)) == (0, SIZE // 2)
    assert allocator.take(1) is None
    allocator.give_back(0)
    assert allocator.take(SIZE // 2 + 1) is None
    assert allocator.take(1) == 0


def test_what_it_can_never_hold_is_known() -> None:
    allocator = Allocator(10 * ALIGNMENT_BYTES + 200)
    assert allocator.fits(10 * ALIGNMENT_BYTES)
    assert not allocator.fits(10 * ALIGNMENT_BYTES + 1)


@given(st.lists(st.integers(0, 9)), st.integers(0, 20))
def test_as_many_as_fit_share_a_block(sizes: list[int], most: int) -> None:
    found = groups(sizes, most)
    assert list(chain.from_iterable(found)) == list(range(len(sizes)))
    assert all(found)
    totals = [sum(sizes[place] for place in group) for group in found]
    assert all(total <= most or len(group) == 1 for total, group in zip(totals, found, strict=True))
    for total, after in zip(totals, found[1:], strict=False):
        assert total + sizes[after[0]] > most
