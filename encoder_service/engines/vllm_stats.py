"""Statistics of what the connector has loaded, for vLLM's log and its /metrics.

vLLM 0.26 asks for neither.
"""

from __future__ import annotations

from concurrent.futures import Future
from time import perf_counter
from typing import Any

from prometheus_client import Counter, Histogram

try:
    from vllm.distributed.ec_transfer.ec_connector.metrics import (
        ECConnectorPromMetrics,
        ECConnectorStats,
    )
except ModuleNotFoundError:
    ECConnectorPromMetrics = ECConnectorStats = object

COUNTERS = {
    "loaded": "Embeddings that were fetched, or encoded in this process.",
    "failed": "Embeddings that could not be fetched, so that their requests failed.",
    "left": "Items encoded by vLLM's own tower.",
    "bytes": "Bytes of loaded embeddings.",
    "ipc": "Embeddings that vLLM's workers copied from an encoder's memory.",
    "unix": "Embeddings received over a unix socket.",
    "tcp": "Embeddings received from an encoder over TCP.",
    "http": "Embeddings fetched from the service over HTTP.",
}
MOST_SECONDS = 10_000  # limit for a vLLM that never asks
BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


class LoadStats(ECConnectorStats):  # type: ignore[misc]  # types are checked without vLLM
    """Figures since the last report: COUNTERS, and in "seconds" the loading time of each
    embedding."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.data: dict[str, Any] = data or {**dict.fromkeys(COUNTERS, 0), "seconds": []}

    def loaded(self, size_bytes: int, seconds: float, path: str = "") -> None:
        """`path`: ipc, unix, tcp or http; empty: encoded in this process."""
        self.data["loaded"] += 1
        if path:
            self.data[path] += 1
        self.data["bytes"] += size_bytes
        if len(self.data["seconds"]) < MOST_SECONDS:
            self.data["seconds"].append(seconds)

    def count(self, name: str) -> None:
        self.data[name] += 1

    def taken(self) -> LoadStats | None:
        """Returns what there is to report, and resets it."""
        if self.is_empty():
            return None
        report = LoadStats(self.data)
        self.reset()
        return report

    def reset(self) -> None:
        self.data = LoadStats().data

    def aggregate(self, other: LoadStats) -> LoadStats:
        return LoadStats({name: self.data[name] + other.data[name] for name in self.data})

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log: what there was since its last line."""
        counts = {name: self.data[name] for name in COUNTERS if self.data[name]}
        seconds = self.data["seconds"]
        if seconds:
            counts["mean seconds"] = round(sum(seconds) / len(seconds), 4)
        return counts

    def is_empty(self) -> bool:
        return not any(self.data.values())


class LoadMetrics(ECConnectorPromMetrics):  # type: ignore[misc]
    """vllm:encoder_service_loaded_total and so on, with vLLM's labels."""

    def __init__(self, *arguments: Any) -> None:
        """Takes the arguments of vLLM's build_prom_metrics."""
        super().__init__(*arguments)
        _, kinds, labels, self.labels = arguments
        self.counters = {
            name: kinds[Counter](f"vllm:encoder_service_{name}", text, labels)
            for name, text in COUNTERS.items()
        }
        self.seconds = kinds[Histogram](
            "vllm:encoder_service_seconds",
            "Seconds to fetch an embedding, or to queue and encode an item in this process.",
            labels,
            buckets=BUCKETS,
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.labels[engine_idx]
        for name, counter in self.counters.items():
            counter.labels(*labels).inc(transfer_stats_data[name])
        for seconds in transfer_stats_data["seconds"]:
            self.seconds.labels(*labels).observe(seconds)


class Stopwatch:
    """Measures the time until a future is done."""

    def __init__(self, future: Future[Any]) -> None:
        self.began = perf_counter()
        self.ended: float | None = None
        future.add_done_callback(self.stop)

    def stop(self, _: object) -> None:
        self.ended = perf_counter()

    @property
    def seconds(self) -> float:
        return (self.ended or perf_counter()) - self.began
