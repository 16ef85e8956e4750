import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.store.kept import EmbeddingCache
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Bytes, Embedding, SharedBytes, Timings

ROW_BYTES = 16


def embedding(data: Bytes | SharedBytes, count: int) -> Embedding:
    shape = (count, ROW_BYTES // 4)
    return Embedding(data, "float32", shape, (1, 2, 2), "graph", Timings(0, 0, 0))


def entry(count: int, value: int = 0) -> Embedding:
    return embedding(np.full(count * ROW_BYTES, value, np.uint8), count)


def shared(count: int) -> Embedding:
    return embedding(SharedBytes(object(), count * ROW_BYTES), count)


def sample(metrics: EncoderMetrics, name: str) -> float:
    return metrics.registry.get_sample_value(f"encoder_cache_{name}") or 0.0


def test_least_recently_used_goes_first() -> None:
    metrics = EncoderMetrics()
    cache = EmbeddingCache(2 * 3 * ROW_BYTES, metrics)
    cache.put(("a",), entry(3, 1))
    cache.put(("b",), entry(3, 2))
    assert cache.get(("a",), 3) is not None
    cache.put(("c",), entry(3, 3))
    assert cache.get(("b",), 3) is None
    found = cache.get(("a",), 3)
    assert found is not None
    assert isinstance(found.data, np.ndarray)
    assert (found.data == 1).all()
    counted = [sample(metrics, n) for n in ("hits_total", "misses_total", "evictions_total")]
    assert counted == [2, 1, 1]


def test_nobody_can_change_what_is_kept() -> None:
    cache = EmbeddingCache(1000, EncoderMetrics())
    original = entry(2, 5)
    cache.put(("a",), original)
    assert isinstance(original.data, np.ndarray)
    original.data[:] = 0
    found = cache.get(("a",), 2)
    assert found is not None
    assert isinstance(found.data, np.ndarray)
    assert (found.data == 5).all()
    with pytest.raises(ValueError, match="read-only"):
        found.data[:] = 0


def test_shared_memory_is_kept_by_reference() -> None:
    cache = EmbeddingCache(1000, EncoderMetrics())
    original = shared(2)
    cache.put(("a",), original)
    assert cache.get(("a",), 2) is original
    assert cache.bytes == 2 * ROW_BYTES


def test_an_entry_of_another_length_is_never_given() -> None:
    metrics = EncoderMetrics()
    cache = EmbeddingCache(1000, metrics)
    cache.put(("a",), entry(2))
    assert cache.get(("a",), 3) is None
    assert (cache.bytes, sample(metrics, "bytes"), sample(metrics, "misses_total")) == (0, 0, 1)


def test_no_bytes_no_cache_and_no_misses_counted() -> None:
    metrics = EncoderMetrics()
    cache = EmbeddingCache(0, metrics)
    cache.put(("a",), entry(1))
    assert cache.get(("a",), 1) is None
    assert sample(metrics, "misses_total") == 0


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12), st.booleans())),
    st.integers(1, 12 * ROW_BYTES * 3),
)
def test_the_limit_is_never_passed(puts: list[tuple[int, int, bool]], max_bytes: int) -> None:
    metrics = EncoderMetrics()
    cache = EmbeddingCache(max_bytes, metrics)
    counts: dict[int, int] = {}
    for key, count, in_shared_memory in puts:
        kept = key in counts and cache.get((str(key),), counts[key])
        cache.put((str(key),), shared(count) if in_shared_memory else entry(count))
        if not kept:
            counts[key] = count
        held = [e for k, n in counts.items() if (e := cache.get((str(k),), n)) is not None]
        assert sum(e.size_bytes for e in held) == cache.bytes <= max_bytes
        assert sample(metrics, "bytes") == cache.bytes
        if count * ROW_BYTES <= max_bytes:
            assert cache.get((str(key),), counts[key]) is not None
