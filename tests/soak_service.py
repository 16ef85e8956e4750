"""`make soak-service`: a service under load for a long time. Exits with 1 if memory grows.

Samples the private memory (RssAnon) of each process of the service and the bytes in the object
store. Growth is the rise of a line fitted to the second half; the first half is warm-up.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
from rich.console import Console

from encoder_service.bench.cluster import cluster, logical_cpus, service
from encoder_service.client import Client
from tests.chaos.__main__ import ROW_MEMORY, STORE_BYTES, hardy, rest, total
from tests.chaos.callers import Callers, known_files
from tests.chaos.sources import sources
from tests.processes import actors, process
from tests.serve.object_store import used

SAMPLES = 60
MOST_GROWTH = 0.05
"""Maximum growth over the second half, relative to its start, that counts as flat."""


def main() -> int:
    parser = argparse.ArgumentParser("soak_service")
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    made = hardy()
    samples: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with cluster(logical_cpus(made), object_store_bytes=STORE_BYTES) as where, service(made, where):
        with Client(where.http) as client:
            known = known_files(client)
        empty = used().bytes
        processes = {name: process(name) for name in actors()}
        callers = Callers(sources(where, made), known)
        callers.start()
        start = time.monotonic()
        while (passed := time.monotonic() - start) < options.seconds:
            for name, number in processes.items():
                samples[name].append((passed, private_bytes(number)))
            samples["the object store"].append((passed, used().bytes))
            time.sleep(options.seconds / SAMPLES)
        callers.stop()
        phase = callers.next_phase()
        left = rest(lambda: max(0, used().bytes - empty) + total(where.http, ROW_MEMORY))
    console = Console()
    console.print(f"{len(phase.latencies_seconds)} requests answered right in {passed:.0f} s,")
    console.print(f"{dict(phase.failed)} failed, {len(phase.wrong)} wrong; {left:g} bytes left")
    rows = {name: growth(points) for name, points in samples.items()}
    for name, (level, grown) in rows.items():
        console.print(f"{name:60} {level / 2**20:8.1f} MiB {grown / 2**20:+8.2f} MiB in its half")
    if options.json:
        options.json.write_text(json.dumps({"seconds": passed, "samples": samples}) + "\n")
    grew = [
        name
        for name, (level, grown) in rows.items()
        if name != "the object store" and grown > MOST_GROWTH * level
    ]
    broken = grew + phase.wrong + sorted(phase.failed) + ["bytes in memory"] * bool(left)
    console.print(f"[red]broken: {', '.join(broken)}" if broken else "memory is flat")
    return 1 if broken else 0


def private_bytes(number: int) -> int:
    """Anonymous memory of a process, which it shares with no other."""
    status = Path(f"/proc/{number}/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert found is not None, "no RssAnon: Linux before 4.5"
    return int(found[1]) * 1024


def growth(points: list[tuple[float, float]]) -> tuple[float, float]:
    """The level at half-time, and the rise of a line fitted to the second half."""
    half = np.array(points[len(points) // 2 :])
    slope, _ = np.polyfit(half[:, 0], half[:, 1], 1)
    return float(half[0, 1]), float(slope * (half[-1, 0] - half[0, 0]))


if __name__ == "__main__":
    sys.exit(main())
