"""Embeddings of items seen before, by the digest of their bytes: looked up before decoding.

One actor, one model: nothing of the model need be in the key. Safe to use from several threads.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from torch import Tensor

from actors.metrics import EncoderMetrics


class EmbeddingCache:
    """Least recently used out first; never more than `max_bytes` of rows."""

    def __init__(self, max_bytes: int, metrics: EncoderMetrics) -> None:
        self.max_bytes = max_bytes
        self.metrics = metrics
        self.bytes = 0
        self._rows: OrderedDict[str, Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, digest: str) -> Tensor | None:
        """Rows [tokens, width] on the host, not to be written to."""
        if not self.max_bytes:
            return None
        with self._lock:
            rows = self._rows.get(digest)
            if rows is not None:
                self._rows.move_to_end(digest)
        (self.metrics.cache_misses if rows is None else self.metrics.cache_hits).inc()
        return rows

    def put(self, digest: str, rows: Tensor) -> None:
        """Keeps a copy, unless it alone is beyond the limit."""
        size = rows.nbytes
        if size > self.max_bytes or digest in self._rows:
            return
        rows = rows.clone()  # outside the lock: look-ups must not wait for it
        with self._lock:
            if digest in self._rows:
                return
            while self.bytes + size > self.max_bytes:
                _, evicted = self._rows.popitem(last=False)
                self.bytes -= evicted.nbytes
                self.metrics.cache_evictions.inc()
            self._rows[digest] = rows
            self.bytes += size
            self.metrics.cache_bytes.set(self.bytes)
