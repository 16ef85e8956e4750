"""`make overload`: five times what a service can do, open loop. Exits with 1 if a promise breaks.

Promises: goodput stays at 90 % of its peak; whoever is admitted waits a bounded time; the others
get 429 at once. Ratios within one run: figures of a CPU say nothing of a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import fmean

import httpx
import numpy as np
from rich.console import Console

from encoder_service.bench.cluster import cluster, logical_cpus, service
from encoder_service.config import ServiceOptions, parse
from tests.images import jpeg

SIDES = (320, 384, 448, 512, 576, 640)
"""Of the images of one request: enough work that the front door is not what is measured."""
FACTOR = 5
QUEUE_SECONDS = 5.0
LEAST_GOODPUT = 0.9
MOST_WAITING = 3.0
"""Times `router.max_queue_seconds`: the most that the p99 of those who were admitted may be."""
CALLERS = 8
TIMEOUT_SECONDS = 120.0


@dataclass(slots=True)
class Outcome:
    """What became of the requests of a phase."""

    right: list[tuple[float, float]] = field(default_factory=list)
    """When each was answered, and after how many seconds."""
    refused_seconds: list[float] = field(default_factory=list)
    other: list[str] = field(default_factory=list)

    def goodput(self, start: float, end: float) -> float:
        """Answered requests a second in this time."""
        return sum(start <= when < end for when, _ in self.right) / (end - start)


Call = Callable[[Outcome], Coroutine[None, None, None]]
"""One request, noted in an outcome."""


def main() -> int:
    """Finds the peak, goes beyond it, judges."""
    parser = argparse.ArgumentParser("overload")
    parser.add_argument("--seconds", type=float, default=30, help="of each of the three phases")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    made = crowded()
    with cluster(logical_cpus(made)) as where, service(made):
        figures = asyncio.run(measure(where.http, options.seconds))
    console = Console()
    for name, value in figures.items():
        console.print(f"{name:28} {value if isinstance(value, str) else f'{value:.3g}'}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    broken = [
        name
        for name, held in {
            "goodput": figures["goodput_of_peak"] >= LEAST_GOODPUT,
            "p99 of the admitted": figures["admitted_p99_seconds"] < MOST_WAITING * QUEUE_SECONDS,
            "refusals are quick": figures["refused_p99_seconds"] < figures["admitted_p50_seconds"],
            "nothing else failed": figures["failed"] == 0,
        }.items()
        if not held
    ]
    console.print(f"[red]broken: {', '.join(broken)}" if broken else "every promise held")
    return 1 if broken else 0


def crowded() -> ServiceOptions:
    """The tiny service, which encodes whatever comes: no cache, nothing joined."""
    return parse(
        {
            "model": {"id": "qwen3vl-tiny", "load_format": "dummy", "dtype": "float32"},
            "encoder": {"replicas": 2, "num_gpus": 0, "num_cpus": 0.1, "device": "cpu"},
            "router": {"num_cpus": 0.1, "coalesce": False, "max_queue_seconds": QUEUE_SECONDS},
            "ingress": {"num_cpus": 0.1},
            "cache": {"max_bytes": 0},
        }
    )


class Sender:
    """Sends one request again and again, as bytes that are made once: a client that costs little.

    It shares the machine with what it measures.
    """

    def __init__(self, url: str) -> None:
        files = [("image", jpeg(side, side)) for side in SIDES]
        request = httpx.Request("POST", f"{url}/v1/encode", files=files)
        head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
        self.sent = f"POST /v1/encode HTTP/1.1\r\n{head}\r\n".encode() + request.read()
        self.host, self.port = request.url.host, request.url.port
        self.idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def post(self) -> tuple[int, bytes]:
        """Status and body. Raises OSError, EOFError, TimeoutError."""
        async with asyncio.timeout(TIMEOUT_SECONDS):
            reader, writer = await self.connection()
            try:
                writer.write(self.sent)
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = re.search(r"\ncontent-length: (\d+)\r", head)
                assert length is not None, head
                body = await reader.readexactly(int(length[1]))
            except BaseException:
                writer.close()
                raise
        self.idle.append((reader, writer))
        return int(head.split()[1]), body

    async def connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """One that lives, or a new one."""
        while self.idle:
            reader, writer = self.idle.pop()
            if not reader.at_eof():
                return reader, writer
            writer.close()
        return await asyncio.open_connection(self.host, self.port)

    async def call(self, outcome: Outcome) -> None:
        """One request, noted."""
        started = time.monotonic()
        try:
            status, body = await self.post()
        except (OSError, EOFError) as error:  # a TimeoutError among them
            outcome.other.append(repr(error))
            return
        now = time.monotonic()
        if status == 200:
            outcome.right.append((now, now - started))
        elif status == 429:
            outcome.refused_seconds.append(now - started)
        else:
            outcome.other.append(body.decode())


async def measure(url: str, seconds: float) -> dict[str, float]:
    """Callers that wait for each answer, arrivals that wait for nothing, and the callers again."""
    call = Sender(url).call
    load = [os.getloadavg()[0]]
    await closed(call, seconds / 4)  # warm
    peaks = [await peak(call, seconds)]
    outcome = Outcome()
    start, own = time.monotonic(), time.process_time()
    sent = await opened(call, outcome, FACTOR * peaks[0], seconds)
    own = time.process_time() - own
    goodput = outcome.goodput(start, start + seconds)
    # Again, as whatever else the machine does changes meanwhile.
    peaks.append(await peak(call, seconds))
    load.append(os.getloadavg()[0])
    for error in outcome.other[:5]:
        print(error, file=sys.stderr)
    admitted = [taken for _, taken in outcome.right] or [np.inf]
    refused = outcome.refused_seconds or [np.inf]
    return {
        "peak_before_per_second": peaks[0],
        "peak_after_per_second": peaks[1],
        "sent_per_second": sent / seconds,
        "goodput_per_second": goodput,
        "goodput_of_peak": goodput / fmean(peaks),
        "admitted": len(outcome.right),
        "admitted_p50_seconds": float(np.percentile(admitted, 50)),
        "admitted_p99_seconds": float(np.percentile(admitted, 99)),
        "refused": len(outcome.refused_seconds),
        "refused_p50_seconds": float(np.percentile(refused, 50)),
        "refused_p99_seconds": float(np.percentile(refused, 99)),
        "failed": len(outcome.other),
        "client_cpu_ms_per_request": 1e3 * own / sent,
        "load_average_before": load[0],
        "load_average_after": load[1],
    }


async def peak(call: Call, seconds: float) -> float:
    """Goodput of callers that wait for each answer."""
    start = time.monotonic()
    return (await closed(call, seconds)).goodput(start, start + seconds)


async def closed(call: Call, seconds: float) -> Outcome:
    """So many callers, each waiting for its answer before it calls again."""
    outcome = Outcome()
    end = time.monotonic() + seconds

    async def caller() -> None:
        while time.monotonic() < end:
            await call(outcome)

    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    return outcome


async def opened(call: Call, outcome: Outcome, per_second: float, seconds: float) -> int:
    """Arrivals at random times, whatever became of those before. How many were sent."""
    random = Random(1)
    start = due = time.monotonic()
    sent = 0
    async with asyncio.TaskGroup() as group:
        while (due := due + random.expovariate(per_second)) < start + seconds:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            group.create_task(call(outcome))
            sent += 1
    return sent


if __name__ == "__main__":
    sys.exit(main())
