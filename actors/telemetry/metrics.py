"""The series of an encoder actor. Each replica has its own registry; the ingress merges them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
ITEMS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class EncoderMetrics:
    """Declared here and nowhere else. No label grows with traffic."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.items = self._counter(
            "items_total", "Items answered with an embedding.", "type", "source"
        )
        self.failures = self._counter(
            "item_failures_total", "Items answered with an error.", "error"
        )
        self.graph_hits = self._counter(
            "graph_hits_total",
            "Items and runs that a captured graph served.",
            "path",
            "budget",
            "backend",
        )
        self.graph_misses = self._counter(
            "graph_misses_total", "Items and runs that ran eagerly, and why.", "path", "reason"
        )
        self.pack_outcomes = self._counter(
            "pack_outcomes_total", "Packs by what ran: graph, eager or skip a path.", "outcome"
        )
        self.tokens = self._counter("tokens_total", "Output tokens computed, padding aside.")
        self.padded_tokens = self._counter(
            "padded_tokens_total", "Tokens computed for nobody: budget less content.", "path"
        )
        self.patches = self._counter("patches_total", "Patches encoded.")
        self.video_runs = self._counter(
            "video_runs_total", "Runs of videos that one pack could not hold."
        )
        self.pack_items = self._histogram("pack_items", "Items that shared a pack.", ITEMS)
        self.queue_seconds = self._histogram(
            "queue_seconds", "From being ready to the start of the pack.", SECONDS
        )
        self.decode_queue_seconds = self._histogram(
            "decode_queue_seconds", "From arrival to a free decoding thread, an item.", SECONDS
        )
        self.preprocess_seconds = self._histogram(
            "preprocess_seconds",
            "Decoding, resizing, cutting into patches, an item or a batch.",
            SECONDS,
        )
        self.preprocessed = self._counter(
            "preprocessed_items_total", "Items decoded and cut into patches."
        )
        self.decode_restarts = self._counter(
            "decode_restarts_total", "Decoding processes replaced, that ended or hung."
        )
        self.encode_seconds = self._histogram(
            "encode_seconds", "From the start of a pack to its rows on the host.", SECONDS
        )
        self.busy_seconds = self._counter(
            "busy_seconds_total", "Seconds in which a pack was on the device."
        )
        self.cache_hits = self._counter("cache_hits_total", "Items found in the cache.")
        self.cache_misses = self._counter("cache_misses_total", "Items not found in the cache.")
        self.cache_evictions = self._counter("cache_evictions_total", "Items pushed out.")
        self.cache_bytes = self._gauge("cache_bytes", "Bytes of rows in the cache.")
        self.nixl_bytes = self._gauge(
            "nixl_bytes", "Device memory with rows that wait for readers."
        )
        self.nixl_items = self._counter("nixl_items_total", "Items whose rows were left there.")
        self.nixl_full = self._counter(
            "nixl_full_total", "Items that found no room there and went by shared memory."
        )
        self.references = self._gauge("references", "Embeddings kept for clients, by id.")
        self.reference_bytes = self._gauge("reference_bytes", "Bytes of these.")
        self.reference_evictions = self._counter(
            "reference_evictions_total", "Of these, pushed out before their time was over."
        )
        self.captured_graphs = self._gauge("captured_graphs", "Graphs ready to replay.", "path")
        self.graph_memory_bytes = self._gauge(
            "graph_memory_bytes", "Device memory of graphs and their static buffers."
        )

    def text(self) -> str:
        """All series in Prometheus' text format."""
        return generate_latest(self.registry).decode()

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"encoder_{name}", help_text, labels, registry=self.registry)

    def _gauge(self, name: str, help_text: str, *labels: str) -> Gauge:
        return Gauge(f"encoder_{name}", help_text, labels, registry=self.registry)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"encoder_{name}", help_text, buckets=buckets, registry=self.registry)
