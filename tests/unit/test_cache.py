import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.cache import EmbeddingCache
from actors.metrics import EncoderMetrics


def rows(count: int, value: float = 0.0) -> torch.Tensor:
    return torch.full((count, 4), float(value))


def sample(metrics: EncoderMetrics, name: str) -> float:
    return metrics.registry.get_sample_value(f"encoder_cache_{name}") or 0.0


def test_least_recently_used_goes_first() -> None:
    metrics = EncoderMetrics()
    cache = EmbeddingCache(2 * rows(3).nbytes, metrics)
    cache.put("a", rows(3, 1))
    cache.put("b", rows(3, 2))
    assert cache.get("a") is not None
    cache.put("c", rows(3, 3))
    assert cache.get("b") is None
    assert torch.equal(cache.get("a"), rows(3, 1))  # type: ignore[arg-type]
    assert [sample(metrics, n) for n in ("hits_total", "misses_total", "evictions_total")] == [
        2,
        1,
        1,
    ]


def test_an_entry_is_a_copy() -> None:
    cache = EmbeddingCache(1000, EncoderMetrics())
    original = rows(2, 5)
    cache.put("a", original)
    original.zero_()
    assert torch.equal(cache.get("a"), rows(2, 5))  # type: ignore[arg-type]


def test_no_bytes_no_cache_and_no_misses_counted() -> None:
    metrics = EncoderMetrics()
    cache = EmbeddingCache(0, metrics)
    cache.put("a", rows(1))
    assert cache.get("a") is None
    assert sample(metrics, "misses_total") == 0


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12))), st.integers(1, 200))
def test_the_limit_is_never_passed(puts: list[tuple[int, int]], max_bytes: int) -> None:
    metrics = EncoderMetrics()
    cache = EmbeddingCache(max_bytes, metrics)
    sizes: dict[str, int] = {}
    for key, count in puts:
        cache.put(str(key), rows(count))
        sizes.setdefault(str(key), count)
        held = [entry for k in range(10) if (entry := cache.get(str(k))) is not None]
        assert sum(entry.nbytes for entry in held) == cache.bytes <= max_bytes
        assert sample(metrics, "bytes") == cache.bytes
