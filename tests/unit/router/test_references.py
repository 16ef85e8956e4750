"""Embeddings kept under ids: bounded in time and bytes in a replica."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.errors import Overloaded, TooLarge
from actors.options import ReferenceOptions
from actors.store.kept import OVERHEAD_BYTES, Hold, Kept, References
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Embedding, SharedBytes, Timings
from tests.unit.fleet import item

ENTRY_BYTES = 1000 + OVERHEAD_BYTES


def kept(number: int, size_bytes: int = 1000) -> Kept:
    data = SharedBytes(object(), size_bytes)
    nothing = Timings(0, 0, 0)
    found = Embedding(data, "bfloat16", (1, 500), (1, 2, 2), "graph", nothing)
    return Kept(item(number), found)


def references(max_bytes: int = 10 * ENTRY_BYTES) -> tuple[References, EncoderMetrics]:
    metrics = EncoderMetrics()
    return References(ReferenceOptions(ttl_seconds=60, max_bytes=max_bytes), metrics), metrics


def sample(metrics: EncoderMetrics, name: str) -> float:
    return metrics.registry.get_sample_value(f"encoder_reference{name}") or 0.0


def test_a_time_to_live_counts_from_the_keeping() -> None:
    store, metrics = references()
    name = store.keep(kept(1), 100)
    assert store.get(name, 159.9) is not None
    assert store.get(name, 160) is None
    assert (store.bytes, sample(metrics, "s"), sample(metrics, "_bytes")) == (0, 0, 0)


class Watched(float):
    """A time that counts what it is compared with."""

    looks = 0

    def __ge__(self, other: float) -> bool:
        self.looks += 1
        return super().__ge__(other)


def test_a_look_does_not_go_through_all_that_is_kept() -> None:
    store, _ = references(1000 * ENTRY_BYTES)
    names = [store.keep(kept(number), number / 100) for number in range(1000)]
    now = Watched(61)
    assert store.get(names[-1], now) is not None
    assert store.get(names[100], now) is None  # ended at 61
    assert 101 < now.looks < 110


def test_the_one_fetched_longest_ago_makes_room() -> None:
    store, metrics = references(2 * ENTRY_BYTES)
    first, second = store.keep(kept(1), 0), store.keep(kept(2), 0)
    assert store.get(first, 1)
    third = store.keep(kept(3), 2)
    assert [store.get(name, 3) is not None for name in (first, second, third)] == [
        True,
        False,
        True,
    ]
    assert sample(metrics, "_evictions_total") == 1


def test_an_object_counts_whole_and_once_as_long_as_one_of_its_embeddings_is_kept() -> None:
    store, metrics = references()
    one = object()
    nothing = Timings(0, 0, 0)
    parts = [
        Embedding(
            SharedBytes(one, 500, place, 1000), "bfloat16", (1, 250), (1, 2, 2), "graph", nothing
        )
        for place in range(3)
    ]
    names = [store.keep(Kept(item(place), part), 0) for place, part in enumerate(parts)]
    assert store.bytes == 1500 + 3 * OVERHEAD_BYTES
    for name in names[:2]:
        store.release(name)
    assert store.bytes == sample(metrics, "_bytes") == 1500 + OVERHEAD_BYTES
    store.release(names[2])
    assert store.bytes == 0


def test_one_that_could_never_be_kept_is_refused() -> None:
    store, _ = references(ENTRY_BYTES)
    with pytest.raises(TooLarge, match=r"references\.max_bytes"):
        store.keep(kept(1, 1001), 0)


def test_arrays_are_kept_as_copies() -> None:
    store, _ = references()
    whole = np.arange(100, dtype=np.uint8)
    view = Embedding(whole[:10], "bfloat16", (1, 5), (1, 2, 2), "graph", Timings(0, 0, 0))
    found = store.get(store.keep(Kept(item(1), view), 0), 0)
    assert found is not None
    assert isinstance(found.embedding.data, np.ndarray)
    assert found.embedding.data.base is None
    assert (found.embedding.data == whole[:10]).all()


def test_released_once() -> None:
    store, _ = references()
    name = store.keep(kept(1), 0)
    assert [store.release(name), store.release(name), store.get(name, 0)] == [True, False, None]


def test_the_largest_object_that_can_be_kept() -> None:
    store, _ = references()
    store.keep(kept(1, store.largest_bytes), 0)
    with pytest.raises(TooLarge):
        store.keep(kept(2, store.largest_bytes + 1), 0)


@given(st.lists(st.tuples(st.integers(0, 40_000), st.integers(0, 30))), st.integers(1, 100_000))
def test_the_bytes_are_never_passed(puts: list[tuple[int, int]], max_bytes: int) -> None:
    store, metrics = references(max_bytes)
    now = 0.0
    for size_bytes, seconds in puts:
        now += seconds
        one = kept(1, size_bytes)
        if one.size_bytes > max_bytes:
            continue
        name = store.keep(one, now)
        assert store.get(name, now) is one
        assert one.size_bytes <= store.bytes <= max_bytes
        assert sample(metrics, "_bytes") == store.bytes
    store.expire(now + 60)
    assert store.bytes == 0


def test_each_of_two_ids_lets_go_of_its_own() -> None:
    store, _ = references()
    one = kept(1)
    first, second = store.keep(one, 0), store.keep(one, 1)
    assert second != first
    assert store.get(second, 1) is store.get(first, 1)
    assert store.bytes == ENTRY_BYTES + OVERHEAD_BYTES, "one object"
    assert store.release(first)
    assert store.get(second, 1)
    assert store.get(first, 1) is None


def test_what_is_held_neither_expires_nor_makes_room() -> None:
    store, metrics = references(2 * ENTRY_BYTES)
    held, other = store.keep(kept(1), 0), store.keep(kept(2), 0)
    for _ in range(2):
        hold = store.hold(held, 59)
        assert hold
        assert hold.kept is store.get(held, 59)
    assert store.get(held, 1000)
    assert store.get(other, 1000) is None
    for number in range(3, 6):
        store.keep(kept(number), 1000 + number)
    assert store.get(held, 1010)
    assert sample(metrics, "s_held") == 1
    store.free(held, 1010)
    store.expire(2000)
    assert store.get(held, 2000)
    store.free(held, 2000)
    assert store.get(held, 2059)
    assert store.get(held, 2060) is None
    assert store.hold(held, 2060) is None
    assert (store.bytes, sample(metrics, "s_held")) == (0, 0)


def test_where_everything_is_held_nothing_more_is_kept() -> None:
    store, _ = references(2 * ENTRY_BYTES)
    names = [store.keep(kept(number), 0) for number in range(2)]
    for name in names:
        store.hold(name, 0)
    with pytest.raises(Overloaded, match=r"references\.max_bytes"):
        store.keep(kept(3), 0)
    store.free(names[1], 0)
    store.keep(kept(3), 0)
    assert [store.get(name, 0) is not None for name in names] == [True, False]


def test_what_cannot_be_kept_evicts_nothing() -> None:
    store, metrics = references(4 * ENTRY_BYTES)
    store.hold(store.keep(kept(1, 1000 + ENTRY_BYTES), 0), 0)
    others = [store.keep(kept(number), 0) for number in (2, 3)]
    with pytest.raises(Overloaded, match="no room"):
        store.keep(kept(4, 1000 + 2 * ENTRY_BYTES), 0)
    assert all(store.get(name, 0) for name in others)
    assert sample(metrics, "_evictions_total") == 0


def test_what_is_released_while_it_is_held_is_there_for_its_holder_alone() -> None:
    store, _ = references()
    name = store.keep(kept(1), 0)
    store.hold(name, 0)
    store.hold(name, 0)
    assert [store.release(name), store.release(name)] == [True, False]
    assert store.get(name, 0) is None
    assert store.hold(name, 0) is None
    store.free(name, 0)
    assert store.held(name).kept
    assert store.bytes == ENTRY_BYTES
    store.free(name, 0)
    assert store.bytes == 0


def test_the_block_used_longest_ago_is_evicted_but_no_held_one() -> None:
    store, _ = references()
    blocks = [Block() for _ in range(3)]
    gone = [weakref.ref(block) for block in blocks]
    names = [store.keep(kept(number), 0, block) for number, block in enumerate(blocks)]
    del blocks
    store.keep(kept(4), 0)
    for name in names[:2]:
        store.hold(name, 0)
    store.free(names[0], 0)
    evicted = []
    while store.evict_block():
        evicted.append([one() is None for one in gone])
    assert evicted == [[False, False, True], [True, False, True]]
    assert store.held(names[1]).block is gone[1]()
    entry = store.held(names[2]).kept
    assert store.hold(names[2], 0) == Hold(names[2], entry, None), "its entry stays"
    store.free(names[1], 0)
    store.release(names[1])
    assert gone[1]() is None


class Block:
    """In the place of a tensor."""


def halves(*names: str) -> list[str]:
    return [name.partition(".")[0] for name in names]


def test_the_first_half_of_a_name_stands_for_all_equal_items() -> None:
    store, _ = references()
    other, _ = references()
    first, second, different = (
        store.keep(kept(1), 0),
        store.keep(kept(1), 1),
        store.keep(kept(2), 2),
    )
    half, same, unlike = halves(first, second, different)
    assert half == same != unlike
    assert half not in halves(other.keep(kept(1), 0)), "nobody can know it from the content"
    assert first != second
    assert store.find(half, 3) == second
    assert not store.release(half), "it is not the caller's alone"
    assert store.release(second)
    assert store.find(half, 3) == first
    assert store.get(half, 59.9) is not None
    assert store.get(half, 60) is None
    assert store.keep(kept(1), 61).startswith(f"{half}."), "a language model may still have it"


def test_what_is_held_by_the_first_half_of_its_name_stays() -> None:
    store, _ = references(2 * ENTRY_BYTES)
    first = store.keep(kept(1), 0)
    (half,) = halves(first)
    one = store.hold(half, 1)
    second = store.keep(kept(1), 2)
    store.hold(second, 2)
    assert store.hold(half, 3) == one, "the same, or `free` could not tell which is still read"
    with pytest.raises(Overloaded):
        store.keep(kept(2), 4)
    assert store.release(first)
    assert store.release(second)
    assert store.get(half, 5) is None
    assert store.held(half) == one, "it is read"
    store.free(second, 6)
    store.free(half, 6)
    assert store.bytes == ENTRY_BYTES
    store.free(half, 6)
    assert store.bytes == 0
    assert store.hold(half, 7) is None


def test_a_reader_that_ends_takes_nothing_from_another_one() -> None:
    store, _ = references(2 * ENTRY_BYTES)
    (half,) = halves(store.keep(kept(1), 0))
    store.hold(half, 1)
    store.keep(kept(1), 2)  # equal, and kept anew
    reading = store.hold(half, 3)
    assert reading
    store.free(half, 4)  # the first reader's
    store.keep(kept(2), 5)
    assert store.find(reading.name, 6) == reading.name
    store.release(reading.name)
    assert store.held(half) == reading
