"""`make refusals`: the cost of a rejection, as CPU time of each process of the service.

The encoders are stopped while the router is full, so that every further request is rejected.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from encoder_service.bench.cluster import cluster, logical_cpus, service
from encoder_service.bench.mix import parse_mix, picture
from encoder_service.config import ServiceOptions, parse
from tests.overload import IMAGES, crowded
from tests.processes import Clocks, actors, command, ours, process
from tests.senders import Outcome, Sender

HELD = 2
"""Requests that fill the router while the encoders are stopped."""
PATCHES = 5680
"""Patches of one request (tests.overload.IMAGES)."""
REFUSALS = 400
AT_ONCE = 4


def main() -> int:
    made = full()
    with cluster(logical_cpus(made)) as where, service(made, where):
        processes = {f"{command(number)} {number}": number for number in ours()[1:]}
        named = {name: process(name) for name in actors()}
        processes = {k: n for k, n in processes.items() if n not in named.values()} | named
        seconds = asyncio.run(measure(where.http, processes))
    for name, taken in sorted(seconds.items()):
        if taken:
            print(f"{name:70} {1e3 * taken / REFUSALS:6.2f} ms")
    print(f"{'together':70} {1e3 * sum(seconds.values()) / REFUSALS:6.2f} ms")
    return 0


def full() -> ServiceOptions:
    """The service of `make overload`. Its health checks are so slow that stopped encoders pass."""
    options = crowded().model_dump()
    long = {"health_check_period_seconds": 600, "health_check_timeout_seconds": 600}
    options["encoder"] |= long
    options["router"] |= {"max_outstanding_patches": HELD * PATCHES, "stall_seconds": 600}
    return parse(options)


async def measure(url: str, processes: dict[str, int]) -> dict[str, float]:
    images = [picture(*size, seed=0) for size in parse_mix(IMAGES)[0]]
    sender, outcome, clocks = Sender(url, images), Outcome(), Clocks()
    for _ in range(HELD):
        await sender.call(outcome)
    encoders = [number for name, number in processes.items() if "#Encoder#" in name]
    for number in encoders:
        os.kill(number, signal.SIGSTOP)
    try:
        held = [asyncio.create_task(sender.call(Outcome())) for _ in range(HELD)]
        await asyncio.sleep(2)
        await asyncio.wait_for(sender.call(outcome), 60)  # the first to be rejected
        before = clocks.look(processes.values())
        for _ in range(REFUSALS // AT_ONCE):
            await asyncio.gather(*(sender.call(outcome) for _ in range(AT_ONCE)))
        after = clocks.look(processes.values())
    finally:
        for number in encoders:
            os.kill(number, signal.SIGCONT)
    await asyncio.gather(*held)
    assert len(outcome.refused_seconds) == REFUSALS + 1, outcome.other
    return {name: after[number] - before[number] for name, number in processes.items()}


if __name__ == "__main__":
    sys.exit(main())
