"""`make overload`: five times what a service can do, open loop. Exits with 1 if a promise breaks.

Promises: goodput stays at 90 % of its peak; whoever is admitted waits a bounded time; the others
get 429 at once. Ratios within one run: figures of a CPU say nothing of a GPU.

Encoders that compute on the CPU have half of the cores to themselves, as those on GPUs have their
GPUs, and all else has the other half. `--together`: everybody takes from everybody.
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
"""Of one request: enough work that the front door is not what is measured."""
FACTOR = 5
QUEUE_SECONDS = 5.0
SETTLE = 2
"""Times `router.max_queue_seconds`, before a phase counts: until its queue is as long as it gets,
and what waits in it is decoded."""
LEAST_GOODPUT = 0.9
MOST_WAITING = 3.0
"""Times `router.max_queue_seconds`: the most that the p99 of those who were admitted may be."""


@dataclass(frozen=True, slots=True)
class Phase:
    """What there was of a phase once it had settled. Cores: seconds of CPU a second."""

    goodput_per_second: float
    busy: float
    """Part of the time that an encoder had a pack on its device, their mean."""
    encoder_cores: float
    other_cores: float
    """Of front door, proxy and Ray."""
    client_cores: float

    @property
    def encoder_ms(self) -> float:
        """CPU of the encoders for one answer: the same in all phases, if none of it is in vain."""
        return 1e3 * self.encoder_cores / max(self.goodput_per_second, 1e-9)


class Watch:
    """Looks at a service that runs, in a cluster of this process."""

    def __init__(self, url: str, *, apart: bool) -> None:
        self.url = url
        self.encoders = [process(name) for name in actors() if "#Encoder#" in name]
        self.clocks = Clocks()
        if apart:
            run_apart(self.encoders, ours())

    async def over(self, outcome: Outcome, seconds: float) -> Phase:
        """So long, from now on."""
        before = await self.look()
        await asyncio.sleep(seconds)
        after = await self.look()
        (start, *_), (end, *_) = before, after
        busy, encoders, others, client = (after - before)[1:] / (end - start)
        goodput = outcome.answered(start, end) / (end - start)
        return Phase(goodput, busy / len(self.encoders), encoders, others, client)

    async def look(self) -> np.ndarray:
        """Now; then seconds so far: of work on devices; CPU of encoders, of others, of clients."""
        samples = await asyncio.to_thread(scrape, self.url)
        busy = sum(n for (name, _), n in samples.items() if name == "encoder_busy_seconds_total")
        clocks = self.clocks.look(ours())
        encoders = sum(clocks[number] for number in self.encoders)
        client = clocks[os.getpid()]
        others = sum(clocks.values()) - encoders - client
        return np.array([time.monotonic(), busy, encoders, others, client])


def main() -> int:
    parser = argparse.ArgumentParser("overload")
    parser.add_argument("--seconds", type=float, default=20, help="of each phase, once it settled")
    parser.add_argument("--together", action="store_true", help="no cores for encoders alone")
    parser.add_argument("--config", type=Path, help="of a service without cache and coalescing")
    parser.add_argument("--images", default=IMAGES, help="of a request")
    parser.add_argument("--callers", type=int, default=8, help="that find the peak")
    parser.add_argument("--reference", action="store_true", help="embeddings stay in the service")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    made = load(options.config) if options.config else crowded()
    on_cpu = made.encoder.device == "cpu"
    apart = on_cpu and not options.together and len(os.sched_getaffinity(0)) > 1
    queue_seconds = made.router.max_queue_seconds
    with cluster(logical_cpus(made)) as where, service(made):
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
        "refusals are quick": figures["refused_p99_seconds"] < figures["admitted_p50_seconds"],
        "nothing else failed": figures["failed"] == 0,
    }
    broken = [name for name, kept in held.items() if not kept]
    Console().print(f"[red]broken: {', '.join(broken)}" if broken else "every promise held")
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


async def measure(
    sender: Sender, watch: Watch, callers: int, lengths: tuple[float, float]
) -> tuple[dict[str, Phase], dict[str, float]]:
    """Callers that wait for each answer, arrivals that wait for nothing, and the callers again.

    `lengths`: seconds until a phase counts, and while it does. Whatever else the machine does may
    change meanwhile, hence the second peak.
    """
    whole, load = sum(lengths), [os.getloadavg()[0]]

    phases: dict[str, Phase] = {}

    async def phase(name: str, of: Coroutine[None, None, None], outcome: Outcome) -> float:
        running = asyncio.create_task(of)
        await asyncio.sleep(lengths[0])
        phases[name] = await watch.over(outcome, lengths[1])
        await running
        goodput = phases[name].goodput_per_second
        print(f"{name}: {goodput:.2f} a second", file=sys.stderr, flush=True)
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
    """Answers for each second of the encoders' CPU, overload against peaks: the machine's other
    work takes from both alike."""
    peaks = fmean(one.encoder_ms for name, one in phases.items() if name != "overload")
    return peaks / phases["overload"].encoder_ms


def show(phases: dict[str, Phase], figures: dict[str, float], *, apart: bool) -> None:
    console = Console()
    table = Table(title="encoders' CPU apart" if apart else None)
    for name in ("", *phases):
        table.add_column(name, justify="right" if name else "left")
    rows: dict[str, Callable[[Phase], str]] = {
        "answered, a second": lambda one: f"{one.goodput_per_second:.2f}",
        "encoders at work": lambda one: f"{one.busy:.0%}",
        "cores of the encoders": lambda one: f"{one.encoder_cores:.2f}",
        "CPU of them for an answer, ms": lambda one: f"{one.encoder_ms:.0f}",
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
