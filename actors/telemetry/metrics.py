"""The metrics of an encoder replica. The ingress merges the pages of all replicas into one."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
ITEMS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TOKENS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


class EncoderMetrics:
    """Every metric of the encoder, with labels of bounded cardinality only."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, namespace="encoder", registry=self.registry)
        gauge = partial(Gauge, namespace="encoder", registry=self.registry)
        histogram = partial(Histogram, namespace="encoder", registry=self.registry, buckets=SECONDS)
        self.items = counter(
            "items_total",
            "Items answered with an embedding, by its source.",
            ("type", "source"),
        )
        self.failures = counter("item_failures_total", "Items answered with an error.", ("error",))
        self.graph_hits = counter(
            "graph_hits_total",
            "Items and video chunks encoded by a captured graph.",
            ("path", "budget", "backend"),
        )
        self.graph_misses = counter(
            "graph_misses_total",
            "Items and video chunks encoded without a graph, and why.",
            ("path", "reason"),
        )
        self.pack_outcomes = counter(
            "pack_outcomes_total",
            "Packs by what each path did: graph, eager or skip.",
            ("outcome",),
        )
        self.tokens = counter("tokens_total", "Output tokens computed, without padding.")
        self.padded_tokens = counter(
            "padded_tokens_total", "Padding tokens computed: budget minus content.", ("path",)
        )
        self.patches = counter("patches_total", "Patches encoded.")
        self.pruned_patches = counter(
            "pruned_patches_total", "Image patches that preprocess.prune dropped before encoding."
        )
        self.video_runs = counter(
            "video_runs_total", "Chunks of videos that did not fit into one pack."
        )
        self.pack_items = histogram("pack_items", "Items per pack.", buckets=ITEMS)
        self.item_tokens = histogram(
            "item_tokens",
            "Tokens computed per item or video chunk, over all paths, without padding.",
            buckets=TOKENS,
        )
        self.queue_seconds = histogram(
            "queue_seconds", "Seconds from the end of an item's decoding to the start of its pack."
        )
        self.decode_queue_seconds = histogram(
            "decode_queue_seconds", "Seconds an item waits for a free decoder."
        )
        self.preprocess_seconds = histogram(
            "preprocess_seconds", "Seconds to decode, resize and patchify an item."
        )
        self.preprocessed = counter("preprocessed_items_total", "Items decoded and patchified.")
        self.decode_restarts = counter(
            "decode_restarts_total", "Decoder processes replaced because they exited or hung."
        )
        self.encode_seconds = histogram(
            "encode_seconds", "Seconds from the start of a pack until its rows are on the host."
        )
        self.busy_seconds = counter(
            "busy_seconds_total", "Seconds during which a pack was on the device."
        )
        self.cache_hits = counter("cache_hits_total", "Items found in the cache.")
        self.cache_misses = counter("cache_misses_total", "Items not found in the cache.")
        self.cache_evictions = counter("cache_evictions_total", "Items evicted from the cache.")
        self.cache_bytes = gauge("cache_bytes", "Bytes of embeddings in the cache.")
        self.shared_cache_hits = counter(
            "shared_cache_hits_total", "Items found in the shared cache."
        )
        self.shared_cache_misses = counter(
            "shared_cache_misses_total", "Items not found in the shared cache."
        )
        self.shared_cache_failures = counter(
            "shared_cache_failures_total",
            "Reads and writes of the shared cache that failed or took too long.",
            ("operation",),
        )
        self.shared_cache_skipped = counter(
            "shared_cache_skipped_total",
            "Embeddings not written to the shared cache because writing was behind or paused.",
        )
        self.shared_cache_seconds = histogram(
            "shared_cache_seconds", "Seconds to read an embedding from the shared cache."
        )
        self.nixl_bytes = gauge(
            "nixl_bytes", "Bytes of device memory holding rows for NIXL readers."
        )
        self.nixl_items = counter(
            "nixl_items_total", "Items whose rows were left in device memory."
        )
        self.nixl_full = counter(
            "nixl_full_total", "Items sent through shared memory because device memory was full."
        )
        self.references = gauge("references", "Embeddings kept for clients under an id.")
        self.reference_bytes = gauge("reference_bytes", "Bytes of the embeddings kept for clients.")
        self.references_held = gauge(
            "references_held", "Embeddings kept for clients that language models are about to read."
        )
        self.reference_device_bytes = gauge(
            "reference_device_bytes", "Bytes of references.device_bytes in use."
        )
        self.row_memory_bytes = gauge(
            "row_memory_bytes", "Bytes of host memory for rows in use, lent rows among them."
        )
        self.reference_evictions = counter(
            "reference_evictions_total",
            "Embeddings kept for clients that were evicted before they expired.",
        )
        self.captured_graphs = gauge(
            "captured_graphs",
            "Captured graphs: one per budget, or two where videos have a graph of their own.",
            ("path",),
        )
        self.graph_memory_bytes = gauge(
            "graph_memory_bytes", "Bytes of device memory used by graphs and their static buffers."
        )

        self.measured_seconds = gauge(
            "measured_seconds",
            "Seconds per launch, per patch, and per pair of patches in attention, measured at "
            "start. Routers balance by them.",
            ("of",),
        )

    def text(self) -> str:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry).decode()
