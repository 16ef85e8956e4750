"""The cache of embeddings, looked up before decoding.

It keeps references to shared memory, not copies, so that a hit costs nothing however large it is.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import replace

import numpy as np

from actors.telemetry.metrics import EncoderMetrics
from actors.types import Embedding

Key = tuple[str, ...]  # the model's fingerprint and `Media.identity`


class EmbeddingCache:
    """Evicts the least recently used; holds at most `max_bytes` of rows. Thread-safe."""

    def __init__(self, max_bytes: int, metrics: EncoderMetrics) -> None:
        self.max_bytes = max_bytes
        self.metrics = metrics
        self.bytes = 0
        self._entries: OrderedDict[Key, Embedding] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Key, tokens: int) -> Embedding | None:
        """The embedding under a key; None unless it has as many rows as the item must have."""
        if not self.max_bytes:
            return None
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.shape[0] != tokens:
                self._remove(key)
                entry = None
            if entry is not None:
                self._entries.move_to_end(key)
        (self.metrics.cache_misses if entry is None else self.metrics.cache_hits).inc()
        return entry

    def put(self, key: Key, entry: Embedding) -> None:
        """Keeps an embedding, unless it alone is larger than the cache. Arrays are copied."""
        size = entry.size_bytes
        if size > self.max_bytes or key in self._entries:
            return
        entry = sealed(entry)  # outside the lock, so that lookups do not wait
        with self._lock:
            if key in self._entries:
                return
            while self.bytes + size > self.max_bytes:
                self._remove(next(iter(self._entries)))
                self.metrics.cache_evictions.inc()
            self._entries[key] = entry
            self.bytes += size
            self.metrics.cache_bytes.set(self.bytes)

    def _remove(self, key: Key) -> None:
        self.bytes -= self._entries.pop(key).size_bytes
        self.metrics.cache_bytes.set(self.bytes)


def sealed(entry: Embedding) -> Embedding:
    """A copy of its array, which nobody can write to."""
    if not isinstance(entry.data, np.ndarray):
        return entry
    data = entry.data.copy()
    data.setflags(write=False)
    return replace(entry, data=data)
