"""`make overload`: open-loop load at five times a service's capacity. Exits with 1 on failure.

Checks that goodput stays above 90 % of its peak, that admitted requests wait a bounded time, and
that the others get 429 at once. It checks ratios within one run, because absolute figures of a CPU
say nothing about a GPU.

Encoders on the CPU get half of the cores to themselves, as those on GPUs have their GPUs; all other
processes share the other half. With `--together` all processes share all cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
from rich.console import Console
from rich.table import Table

from encoder_service.bench.cluster import cluster, logical_cpus, service
from encoder_service.bench.load import scrape
from encoder_service.bench.mix import parse_mix, picture
from encoder_service.config import ServiceOptions, load, parse
from tests.processes import Clocks, actors, ours, process, run_apart
from tests.senders import Outcome, Sender, closed, opened

IMAGES = "320x320+384x384+448x448+512x512+576x576+640x640"
"""Images of a request: enough work that the front door is not the bottleneck."""
FACTOR = 5
QUEUE_SECONDS = 5.0
SETTLE = 2
"""Multiple of `router.max_queue_seconds` before a phase is measured, so that its queue has its full
length and the items in it are decoded."""
LEAST_GOODPUT = 0.9
MOST_WAITING = 3.0
"""Limit of the p99 latency of admitted requests, as a multiple of `router.max_queue_seconds`."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Figures of a settled phase. Cores are CPU seconds per second."""

    goodput_per_second: float
    busy: float
    """Share of the time in which an encoder had a pack on its device, mean over encoders."""
    encoder_cores: float
    other_cores: float
    client_cores: float

    @property
    def encoder_ms(self) -> float:
        """The encoders' CPU time per answer: equal in all phases if no work is wasted."""
        return 1e3 * self.encoder_cores / max(self.goodput_per_second, 1e-9)


class Watch:
    """Measures a running service on a cluster started by this process."""

    def __init__(self, url: str, *, apart: bool) -> None:
        self.url = url
        self.encoders = [process(name) for name in actors() if "#Encoder#" in name]
        self.clocks = Clocks()
        if apart:
            run_apart(self.encoders, ours())

    async def over(self, outcome: Outcome, seconds: float) -> Phase:
        before = await self.look()
        await asyncio.sleep(seconds)
        after = await self.look()
        (start, *_), (end, *_) = before, after
        busy, encoders, others, client = (after - before)[1:] / (end - start)
        goodput = outcome.answered(start, end) / (end - start)
        return Phase(goodput, busy / len(self.encoders), encoders, others, client)

    async def look(self) -> np.ndarray:
        """Totals so far: [now, seconds of device work, CPU seconds of encoders, of others, of
        clients]."""
        samples = await asyncio.to_thread(scrape, self.url)
        busy = sum(n for (name, _), n in samples.items() if name == "encoder_busy_seconds_total")
        clocks = self.clocks.look(ours())
        encoders = sum(clocks[number] for number in self.encoders)
        client = clocks[os.getpid()]
        others = sum(clocks.values()) - encoders - client
        return np.array([time.monotonic(), busy, encoders, others, client])


def main() -> int:
    parser = argparse.ArgumentParser("overload")
    parser.add_argument(
        "--seconds", type=float, default=20, help="of each phase, once it has settled"
    )
    parser.add_argument(
        "--together", action="store_true", help="share all cores between all processes"
    )
    parser.add_argument("--config", type=Path, help="of a service without cache and coalescing")
    parser.add_argument("--images", default=IMAGES, help="of a request")
    parser.add_argument(
        "--callers", type=int, default=8, help="concurrent callers that find the peak"
    )
    parser.add_argument("--reference", action="store_true", help="embeddings stay in the service")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    made = load(options.config) if options.config else crowded()
    on_cpu = made.encoder.device == "cpu"
    apart = on_cpu and not options.together and len(os.sched_getaffinity(0)) > 1
    queue_seconds = made.router.max_queue_seconds
    with cluster(logical_cpus(made)) as where, service(made, where):
        images = [picture(*size, seed=0) for size in parse_mix(options.images)[0]]
        sender = Sender(where.http, images, reference=options.reference)
        watch = Watch(where.http, apart=apart)
        lengths = SETTLE * queue_seconds, options.seconds
        phases, figures = asyncio.run(measure(sender, watch, options.callers, lengths))
        show(phases, figures, apart=apart)
    if options.json:
        told = figures | {name: asdict(phase) for name, phase in phases.items()}
        options.json.write_text(json.dumps(told, indent=2) + "\n")
    held = {
        "goodput": figures["goodput_of_peak"] >= LEAST_GOODPUT,
        "p99 of the admitted": figures["admitted_p99_seconds"] < MOST_WAITING * queue_seconds,
        "rejections are quick": figures["refused_p99_seconds"] < figures["admitted_p50_seconds"],
        "nothing else failed": figures["failed"] == 0,
    }
    broken = [name for name, kept in held.items() if not kept]
    Console().print(f"[red]failed: {', '.join(broken)}" if broken else "all checks passed")
    return 1 if broken else 0


def crowded() -> ServiceOptions:
    """The tiny service without cache and coalescing, so that it encodes every item."""
    return parse(
        {
            "model": {"id": "qwen3vl-tiny", "load_format": "dummy", "dtype": "float32"},
            "encoder": {"replicas": 2, "num_gpus": 0, "num_cpus": 0.1, "device": "cpu"},
            "router": {"num_cpus": 0.1, "coalesce": False, "max_queue_seconds": QUEUE_SECONDS},
            "ingress": {"num_cpus": 0.1},
            "cache": {"max_bytes": 0},
        }
    )


async def measure(
    sender: Sender, watch: Watch, callers: int, lengths: tuple[float, float]
) -> tuple[dict[str, Phase], dict[str, float]]:
    """A closed-loop phase, an open-loop phase, and the closed-loop phase again.

    `lengths`: seconds until a phase has settled, then seconds to measure. The peak is measured
    twice because other load on the machine may change meanwhile.
    """
    whole, load = sum(lengths), [os.getloadavg()[0]]

    phases: dict[str, Phase] = {}

    async def phase(name: str, of: Coroutine[None, None, None], outcome: Outcome) -> float:
        running = asyncio.create_task(of)
        await asyncio.sleep(lengths[0])
        phases[name] = await watch.over(outcome, lengths[1])
        await running
        goodput = phases[name].goodput_per_second
        print(f"{name}: {goodput:.2f} answers/s", file=sys.stderr, flush=True)
        return goodput

    calm, outcome = Outcome(), Outcome()
    peaks = [await phase("peak before", closed(sender.call, calm, callers, whole), calm)]
    rate = FACTOR * peaks[0]
    goodput = await phase("overload", opened(sender.call, outcome, rate, whole), outcome)
    peaks.append(await phase("peak after", closed(sender.call, calm, callers, whole), calm))
    load.append(os.getloadavg()[0])
    for error in [*calm.other, *outcome.other][:5]:
        print(error, file=sys.stderr)
    admitted = [taken for _, taken in outcome.right] or [np.inf]
    refused = outcome.refused_seconds or [np.inf]
    return phases, {
        "sent_per_second": rate,
        "goodput_of_peak": goodput / fmean(peaks),
        "of_peak_for_as_much_cpu": for_as_much_cpu(phases),
        "admitted": len(outcome.right),
        "admitted_p50_seconds": float(np.percentile(admitted, 50)),
        "admitted_p99_seconds": float(np.percentile(admitted, 99)),
        "refused": len(outcome.refused_seconds),
        "refused_p50_seconds": float(np.percentile(refused, 50)),
        "refused_p99_seconds": float(np.percentile(refused, 99)),
        "refused_in_peaks": len(calm.refused_seconds),
        "failed": len(calm.other) + len(outcome.other),
        "load_average_before": load[0],
        "load_average_after": load[1],
    }


def for_as_much_cpu(phases: dict[str, Phase]) -> float:
    """Answers per CPU second of the encoders, overload over peaks. Other load does not affect
    it."""
    peaks = fmean(one.encoder_ms for name, one in phases.items() if name != "overload")
    return peaks / phases["overload"].encoder_ms


def show(phases: dict[str, Phase], figures: dict[str, float], *, apart: bool) -> None:
    console = Console()
    table = Table(title="encoders on cores of their own" if apart else None)
    for name in ("", *phases):
        table.add_column(name, justify="right" if name else "left")
    rows: dict[str, Callable[[Phase], str]] = {
        "answers/s": lambda one: f"{one.goodput_per_second:.2f}",
        "encoders busy": lambda one: f"{one.busy:.0%}",
        "cores of the encoders": lambda one: f"{one.encoder_cores:.2f}",
        "encoder CPU per answer, ms": lambda one: f"{one.encoder_ms:.0f}",
        "cores of front door and Ray": lambda one: f"{one.other_cores:.2f}",
        "cores of the clients": lambda one: f"{one.client_cores:.3f}",
    }
    for name, told in rows.items():
        table.add_row(name, *map(told, phases.values()))
    console.print(table)
    for name, value in figures.items():
        console.print(f"{name:28} {value:.3g}")


if __name__ == "__main__":
    sys.exit(main())
