"""Measures a service under load: one cluster, and a new service for each policy.

All policies get the same image sizes.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from rich.console import Console
from rich.table import Table

from actors.options import ActorOptions
from encoder_service.bench.arrivals import Traffic, burst, steady
from encoder_service.bench.cluster import Cluster, cluster, logical_cpus, service
from encoder_service.bench.load import Callers, Load, Result, WorkDone, scrape, work_between
from encoder_service.bench.mix import Protocol, Shape, requests
from encoder_service.config import ServiceOptions
from router.options import Policy

SINGLES = 60
"""Requests with one small image, sent one at a time, from which overheads are computed."""
SMALL: list[list[Shape]] = [[(336, 336)]]
WARM_UPS, MOST_WARM_UPS = 4, 64
"""Requests sent before anything is measured: of each kind, and at most of all kinds together."""
MOST_WARM_SECONDS = 5.0
"""After those, the load itself is sent for at most this long, because the first touch of memory is
slow, especially of pinned and shared memory."""
MOST_ALONE_SECONDS = 5.0
"""Length of each of the two measurements of the engines alone."""
ALONE_PER_KIND, MOST_ALONE = 8, 64
"""Requests sent to the engines repeatedly, per kind and at most in total. Nothing caches them."""


@dataclass(frozen=True, slots=True)
class ServePlan:
    kinds: list[list[Shape]]
    """Sizes of the images of each kind of request; the kinds take turns."""
    load: Load
    policies: list[Policy]
    protocols: list[Protocol]
    """Each is measured with the same service."""
    callers: int = 1
    alone: bool = False
    """Also measure the engines without the service."""
    steady_part: float | None = None
    """Then send, and simulate, requests at random times at this part of the first policy's rate."""
    burst: int | None = None
    """Then send, and simulate, this many requests at once."""


def run(options: ServiceOptions, plan: ServePlan, console: Console) -> dict[str, Any]:
    """Measures everything in the plan. Returns the figures as they are written to JSON."""
    alone: dict[str, float] = {}
    runs: list[dict[str, Any]] = []
    with cluster(logical_cpus(options)) as where:
        if plan.alone:
            console.print("measuring the engines alone ...")
            alone = measure_alone(options, plan)
            console.print(f"  {alone['engine_images_per_second']:.1f} images/s")
        for policy in plan.policies:
            most = runs[0]["requests_per_second"] if runs else None
            router = options.router.model_copy(update={"policy": policy})
            chosen = options.model_copy(update={"router": router})
            runs += run_policy(chosen, plan, where, console, most)
    for one in runs:
        for name in ("engine", "pipeline") if plan.alone else ():
            throughput = alone[f"{name}_images_per_second"]
            one[f"{name}_ratio"] = one["images_per_second"] / throughput
    return {"model": options.model.id} | alone | {"runs": runs}


def measure_alone(options: ServiceOptions, plan: ServePlan) -> dict[str, float]:
    """Images per second of as many engines as the service has, with and without decoding."""
    import ray

    from encoder_service.bench.decoding import measure  # imports torch

    different = min(ALONE_PER_KIND * len(plan.kinds), MOST_ALONE)
    sent = [image for one in islice(requests(plan.kinds), different) for image in one]
    replicas = options.encoder.least_replicas
    in_flight = max(1, round(plan.load.concurrency * len(sent) / different / replicas))
    actor = ActorOptions(**{name: getattr(options, name) for name in ActorOptions.model_fields})
    seconds = min(plan.load.seconds, MOST_ALONE_SECONDS)
    # Each engine has its own process, which frees the device for the service when it ends.
    engine: Any = ray.remote(num_cpus=0, num_gpus=options.encoder.num_gpus, max_calls=1)(measure)
    found = ray.get([engine.remote(actor, sent, in_flight, seconds) for _ in range(replicas)])
    engines, pipelines = zip(*found, strict=True)
    return {
        "engine_images_per_second": sum(engines),
        "pipeline_images_per_second": sum(pipelines),
    }


def run_policy(
    options: ServiceOptions,
    plan: ServePlan,
    where: Cluster,
    console: Console,
    most: float | None,
) -> list[dict[str, Any]]:
    """Figures by protocol. `most`: requests per second of the very first run."""
    policy = options.router.policy
    console.print(f"starting the service with policy {policy} ...")
    started = time.perf_counter()
    runs = []
    with service(options, where):
        ready_seconds = time.perf_counter() - started
        callers = Callers(plan.callers, options, where)
        for protocol in plan.protocols:
            console.print(f"sending ({protocol}) ...")
            load = replace(plan.load, protocol=protocol)
            found = run_protocol(options, replace(plan, load=load), where, callers, most)
            most = most or found["requests_per_second"]
            console.print(brief(found))  # remains on the screen if a later run fails
            runs.append({"policy": policy, "protocol": protocol} | found)
        callers.close()
    return [{"ready_seconds": ready_seconds} | one for one in runs]


def brief(found: dict[str, Any]) -> str:
    return (
        f"  {found['images_per_second']:.1f} images/s, p50 {found['p50_ms']:.1f} ms; one alone "
        f"{found['single_image_p50_ms']:.1f} ms, {found['overhead_ms']:.1f} ms of it overhead"
    )


def run_protocol(
    options: ServiceOptions,
    plan: ServePlan,
    where: Cluster,
    callers: Callers,
    most: float | None,
) -> dict[str, Any]:
    single = replace(plan.load, concurrency=1, requests=SINGLES)
    warm_ups = min(WARM_UPS * len(plan.kinds), MOST_WARM_UPS)
    warm = replace(single, requests=warm_ups, timeout_seconds=300)
    callers.send(warm, SMALL)
    callers.send(replace(warm, concurrency=plan.callers), plan.kinds)
    if plan.load.seconds < math.inf:
        seconds = min(plan.load.seconds, MOST_WARM_SECONDS)
        callers.send(replace(plan.load, seconds=seconds), plan.kinds)
    alone = callers.send(single, SMALL)
    before = scrape(where.http)
    result = callers.send(plan.load, plan.kinds)
    found = figures(result, work_between(before, scrape(where.http)), alone)
    by_handle = plan.load.protocol == "handle"
    routers = (options.router if by_handle else options.ingress).replicas
    traffic = Traffic(options, plan.kinds, routers, most or found["requests_per_second"])
    if plan.steady_part:
        found |= steady(callers, plan.load, plan.steady_part, where.http, traffic)
    if plan.burst:
        found |= burst(callers, plan.load, plan.burst, where.http, traffic)
    errors = Counter(found["errors"])
    for name in ("steady_errors", "burst_errors"):
        errors += Counter(found.pop(name, {}))
    return found | {"errors": dict(errors)}


def figures(result: Result, work: WorkDone, alone: Result) -> dict[str, Any]:
    p50, p95, p99 = result.percentiles_ms(50, 95, 99)
    single_items = all(one.images == 1 for one in result.answered)
    (single,) = alone.percentiles_ms(50)
    seconds = result.wall_seconds
    return {
        "requests": len(result.answered),
        "errors": dict(result.errors),
        "p50_ms": p50,
        "p95_ms": p95,
        "p99_ms": p99,
        "requests_per_second": len(result.answered) / seconds,
        "images_per_second": result.total("images") / seconds,
        "patches_per_second": work.patches / seconds,
        "sent_bytes_per_second": result.total("sent_bytes") / seconds,
        "embedding_bytes_per_second": result.total("embedding_bytes") / seconds,
        "graph_hit_rate": work.hit_rate,
        "padding_ratio": work.padding,
        "balance": work.balance,
        "replica_patches": dict(work.replica_patches),
        "single_image_p50_ms": single,
        "overhead_ms": overhead_ms(alone),
    } | ({"loaded_overhead_ms": overhead_ms(result)} if single_items else {})


def overhead_ms(result: Result) -> float:
    return statistics.median(one.overhead_seconds for one in result.answered) * 1e3


ROWS = (
    ("ready_seconds", "start-up time, s", "{:.0f}"),
    ("requests", "requests answered", "{:d}"),
    ("p50_ms", "p50, ms", "{:.1f}"),
    ("p95_ms", "p95, ms", "{:.1f}"),
    ("p99_ms", "p99, ms", "{:.1f}"),
    ("loaded_overhead_ms", "overhead, p50, ms", "{:.1f}"),
    ("requests_per_second", "requests/s", "{:.1f}"),
    ("images_per_second", "images/s", "{:.1f}"),
    ("patches_per_second", "patches/s", "{:,.0f}"),
    ("sent_bytes_per_second", "bytes/s sent", "{:,.0f}"),
    ("embedding_bytes_per_second", "embedding bytes/s", "{:,.0f}"),
    ("graph_hit_rate", "graph hit rate", "{:.1%}"),
    ("padding_ratio", "padding ratio", "{:.1%}"),
    ("balance", "balance, max/mean patches", "{:.2f}"),
    ("steady_requests_per_second", "steady: requests/s at random times", "{:.1f}"),
    ("steady_p50_ms", "steady: p50, ms", "{:.1f}"),
    ("simulated_p50_ms", "  simulated", "{:.1f}"),
    ("steady_p99_ms", "steady: p99, ms", "{:.1f}"),
    ("simulated_p99_ms", "  simulated", "{:.1f}"),
    ("steady_balance", "steady: balance", "{:.2f}"),
    ("simulated_balance", "  simulated", "{:.2f}"),
    ("burst_ms", "burst: time to last response, ms", "{:.0f}"),
    ("simulated_burst_ms", "  simulated", "{:.0f}"),
    ("burst_balance", "burst: balance", "{:.2f}"),
    ("simulated_burst_balance", "  simulated", "{:.2f}"),
    ("single_image_p50_ms", "one 336x336 image alone, p50, ms", "{:.1f}"),
    ("overhead_ms", "  overhead, ms", "{:.1f}"),
    ("engine_ratio", "images/s relative to engines alone", "{:.1%}"),
    ("pipeline_ratio", "images/s relative to engines with decoding", "{:.1%}"),
)


def table(report: dict[str, Any]) -> Table:
    title = report["model"]
    if "engine_images_per_second" in report:
        title += (
            f"; engines alone: {report['engine_images_per_second']:.1f} images/s, "
            f"with decoding {report['pipeline_images_per_second']:.1f}"
        )
    caption = "overhead: everything but decoding, waiting for the device and encoding"
    shown = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    shown.add_column("", no_wrap=True)
    for run in report["runs"]:
        shown.add_column(f"{run['policy']} ({run['protocol']})", justify="right")
    for key, label, pattern in ROWS:
        if any(key not in run for run in report["runs"]):
            continue
        shown.add_row(label, *(pattern.format(run[key]) for run in report["runs"]))
    if any(run["errors"] for run in report["runs"]):
        shown.add_row("errors", *(str(run["errors"] or "none") for run in report["runs"]))
    return shown
