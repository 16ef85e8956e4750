"""The engines of a service without the service: as many processes as it has encoder replicas."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import ray

from actors.options import ActorOptions
from encoder_service.bench.mix import Shape, requests
from encoder_service.config import ServiceOptions

if TYPE_CHECKING:
    from encoder_service.bench.engine.pipeline import Throughput

MOST_SECONDS = 5.0
"""Of each of the two measurements, however long the service is measured."""
KINDS = 8
"""Requests of each kind that are sent round and round: nothing here remembers them."""
MOST_REQUESTS = 64


class Alone:
    """One of them. Ends with its engine, so that the device is free for the service."""

    def measure(
        self, options: ActorOptions, pictures: list[bytes], in_flight: int, seconds: float
    ) -> Throughput:
        """See pipeline.measure."""
        from encoder_service.bench.engine.pipeline import measure  # torch

        return measure(options, pictures, in_flight, seconds)


def measure_alone(
    options: ServiceOptions, kinds: list[list[Shape]], concurrency: int, seconds: float
) -> dict[str, float]:
    """Images a second of all engines together, with and without decoding."""
    different = min(KINDS * len(kinds), MOST_REQUESTS)
    sent = [image for one in islice(requests(kinds), different) for image in one]
    images_a_request = len(sent) / different
    replicas = options.encoder.least_replicas
    in_flight = max(1, round(concurrency * images_a_request / replicas))
    fields = {name: getattr(options, name) for name in ActorOptions.model_fields}
    engine: Any = ray.remote(num_cpus=0, num_gpus=options.encoder.num_gpus)(Alone)
    engines = [engine.remote() for _ in range(replicas)]
    part = min(seconds, MOST_SECONDS)
    try:
        found: list[Throughput] = ray.get(
            [one.measure.remote(ActorOptions(**fields), sent, in_flight, part) for one in engines]
        )
    finally:
        for one in engines:
            ray.kill(one)
    return {
        "engine_images_per_second": sum(one.engine for one in found),
        "pipeline_images_per_second": sum(one.pipeline for one in found),
    }
