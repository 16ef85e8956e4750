"""Blocks of one piece of memory: none overlap, and all of it comes back."""

from hypothesis import given
from hypothesis import strategies as st

from actors.media.blocks import ALIGNMENT, Blocks

SIZE = 20 * ALIGNMENT


def rounded(size: int) -> int:
    """What a block of so many bytes takes."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def largest_gap(taken: dict[int, int]) -> int:
    """Beside the blocks of these offsets and sizes."""
    begins = [*sorted(taken), SIZE]
    ends = [0, *(offset + rounded(taken[offset]) for offset in sorted(taken))]
    return max(begin - end for begin, end in zip(begins, ends, strict=True))


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 6 * ALIGNMENT))))
def test_blocks_are_apart_and_come_back(steps: list[tuple[bool, int]]) -> None:
    blocks = Blocks(SIZE)
    taken: dict[int, int] = {}
    for give, number in steps:
        if give and taken:
            offset = list(taken)[number % len(taken)]
            blocks.give(offset)
            del taken[offset]
            continue
        offset_or_none = blocks.take(number)
        assert (offset_or_none is None) == (rounded(number) > largest_gap(taken))
        if offset_or_none is None:
            continue
        assert offset_or_none % ALIGNMENT == 0
        assert offset_or_none + number <= SIZE
        for other, size in taken.items():
            assert offset_or_none + number <= other or other + size <= offset_or_none
        taken[offset_or_none] = number
        assert blocks.taken_bytes >= sum(taken.values())
    for offset in taken:
        blocks.give(offset)
    assert blocks.taken_bytes == 0
    assert blocks.take(SIZE) == 0, "gaps that touch are one"


def test_what_is_full_says_so_until_there_is_room() -> None:
    blocks = Blocks(SIZE)
    first, second = blocks.take(SIZE // 2), blocks.take(SIZE // 2)
    assert (first, second) == (0, SIZE // 2)
    assert blocks.take(1) is None
    blocks.give(0)
    assert blocks.take(SIZE // 2 + 1) is None
    assert blocks.take(1) == 0
