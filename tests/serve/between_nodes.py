"""Times rows on their way to a reader on another node, relative to one on the encoder's node.

Both nodes are on this machine, so this is Ray's own cost, without a network. Run by
test_several_nodes.py; `pytest -s` shows the figures.
"""

from __future__ import annotations

import asyncio
import time
from statistics import median
from typing import Any

import numpy as np
import ray

from actors.store.shared_memory import read, share
from actors.types import Bytes, SharedBytes
from tests.serve.nodes import nodes

SIZES_BYTES = (3_300_000, 67_000_000)
"""One image of 448x448 and one of 1920x1080 of Qwen3-VL-8B."""
READERS = 8
STORE_BYTES = 3 * READERS * max(SIZES_BYTES)
"""Enough that nothing waits for room."""
WARM_UPS, REPEATS = 1, 4
PLACES = ("here", "there")


class Source:
    """Stands in for an encoder."""

    def __init__(self) -> None:
        self.rows = {size: np.full(size, size % 251, np.uint8) for size in SIZES_BYTES}

    async def encode(self, size_bytes: int) -> tuple[Bytes | SharedBytes, float]:
        """Rows, and when they were ready, in seconds of the machine's monotonic clock."""
        since = time.monotonic()
        return await asyncio.to_thread(share, self.rows[size_bytes]), since


class Reader:
    def __init__(self, source: Any) -> None:
        self.source = source

    async def receive(self, size_bytes: int) -> float:
        """Seconds from when the source has rows until this process has them."""
        data, since = await self.source.encode.remote(size_bytes)
        assert isinstance(data, SharedBytes)
        rows = await read(data)
        seconds: float = time.monotonic() - since
        assert rows.nbytes == size_bytes
        assert rows[0] == rows[-1] == size_bytes % 251
        return seconds


def main() -> None:
    wanted = [{"resources": {place: 1}, "num_cpus": 4} for place in PLACES]
    room = {"object_store_memory": STORE_BYTES}
    with nodes(*(one | room for one in wanted), proxies="Disabled"):
        source = placed(Source, "here").remote()
        readers = {
            place: [placed(Reader, place).remote(source) for _ in range(READERS)]
            for place in PLACES
        }
        for size_bytes in SIZES_BYTES:
            for count in (1, READERS):
                chosen = {place: found[:count] for place, found in readers.items()}
                report(size_bytes, count, measure(size_bytes, chosen))
    print("all nodes did their part")


def placed(actor: type, place: str) -> Any:
    return ray.remote(num_cpus=0.1, resources={place: 0.01})(actor)


def measure(size_bytes: int, readers: dict[str, list[Any]]) -> dict[str, list[float]]:
    """Seconds of every read, by place. The places take turns, all readers of one at a time."""
    taken: dict[str, list[float]] = {place: [] for place in readers}
    for turn in range(WARM_UPS + REPEATS):
        for place, found in readers.items():
            seconds = ray.get([one.receive.remote(size_bytes) for one in found], timeout=60)
            if turn >= WARM_UPS:
                taken[place] += seconds
    return taken


def report(size_bytes: int, count: int, taken: dict[str, list[float]]) -> None:
    here, there = (taken[place] for place in PLACES)
    print(
        f"{size_bytes / 1e6:.1f} MB, {count} readers at a time, {len(there)} reads; ms: "
        f"same node {median(here) * 1e3:.1f}, worst {max(here) * 1e3:.1f}; "
        f"other node {median(there) * 1e3:.1f}, worst {max(there) * 1e3:.1f}; "
        f"ratio of medians {median(there) / median(here):.1f}, "
        f"of worst {max(there) / max(here):.1f}"
    )


if __name__ == "__main__":
    main()
