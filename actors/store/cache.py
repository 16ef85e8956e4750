"""Embeddings of items seen before, by what decides their rows: looked up before decoding.

Keeps references to shared memory rather than copies, so that a hit costs nothing however large.
Safe to use from several threads.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, replace

from actors.telemetry.metrics import EncoderMetrics
from actors.types import Bytes, Dtype, SharedBytes

Key = tuple[str, ...]
"""The model's fingerprint and `Media.identity`."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Rows of one item."""

    data: Bytes | SharedBytes
    dtype: Dtype
    shape: tuple[int, int]
    frame_tokens: tuple[int, ...] = ()
    """See Embedding."""

    @property
    def size_bytes(self) -> int:
        """Of the rows."""
        return self.data.size_bytes if isinstance(self.data, SharedBytes) else self.data.nbytes


class EmbeddingCache:
    """Least recently used out first; never more than `max_bytes` of rows."""

    def __init__(self, max_bytes: int, metrics: EncoderMetrics) -> None:
        self.max_bytes = max_bytes
        self.metrics = metrics
        self.bytes = 0
        self._entries: OrderedDict[Key, Entry] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Key, tokens: int) -> Entry | None:
        """What is kept under the key, if it has as many rows as the item must have."""
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

    def put(self, key: Key, entry: Entry) -> None:
        """Keeps it, unless it alone is beyond the limit. Arrays are copied."""
        size = entry.size_bytes
        if size > self.max_bytes or key in self._entries:
            return
        entry = sealed(entry)  # outside the lock: look-ups must not wait for it
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


def sealed(entry: Entry) -> Entry:
    """The same, with an array of its own that cannot be written to."""
    if isinstance(entry.data, SharedBytes):
        return entry
    data = entry.data.copy()
    data.setflags(write=False)
    return replace(entry, data=data)
