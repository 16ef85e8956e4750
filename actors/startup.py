"""From options to a pipeline that is ready: device, weights, graphs, packing, one warm-up image.

Knows nothing of Ray Serve: the encoder actor and the engine's benchmarks start the same way.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache, partial
from time import monotonic

import numpy as np
import simplejpeg
import torch

from actors.engine.budgets import Capacity, model_capacity
from actors.engine.device import Device
from actors.engine.engine import Engine
from actors.engine.graphs import ExactGraphSet, GraphSet
from actors.engine.packing import Packing, least_cost, monotone, smallest_first
from actors.errors import StartError
from actors.media.decoder import Decoder
from actors.media.image import decode
from actors.media.patchify import patchifier_of
from actors.models.load import load
from actors.models.tower import Tower
from actors.options import ActorOptions, PackingOptions
from actors.pipeline import Pipeline
from actors.store.cache import EmbeddingCache
from actors.store.nixl import DeviceMemory
from actors.store.references import References
from actors.store.writer import RowWriter
from actors.telemetry.metrics import EncoderMetrics
from actors.telemetry.tracing import Spans
from actors.types import Item

CACHED_PLANS = 256  # lists of waiting items whose packs are cached

log = logging.getLogger("ray.serve")


def open_pipeline(
    options: ActorOptions, series: EncoderMetrics, spans: Spans, replica: str
) -> Pipeline:
    """The pipeline of one replica, with every graph captured. Raises StartError."""
    decoder = Decoder(options, series)  # its processes start while the engine captures
    engine = open_engine(options, series)
    references = References(options.references, series)
    memory = None
    if options.encoder.transport == "nixl":
        memory = DeviceMemory(options.encoder.nixl_bytes, engine.device.device, series)
    cache = EmbeddingCache(options.cache.max_bytes, series)
    spec = engine.tower.spec
    writer = RowWriter(spec, cache, memory, references.largest_bytes, replica)
    decoder.wait_until_started()
    return Pipeline(decoder, engine, writer, references, series, spans)


def open_engine(options: ActorOptions, series: EncoderMetrics) -> Engine:
    """An engine on the device of the options, every graph captured. Raises StartError."""
    device = open_device(options.encoder.device)
    captured = options.graphs.mode != "off"
    tower = load(options.model, device.device, captured=captured, blocks=options.graphs.blocks)
    capacity = model_capacity(options.graphs, tower.spec)
    graphs = capture(tower, capacity, device, series)
    packing = choose_packing(options.packing, graphs)
    # In an engine of its own, so that the metrics count only what clients sent.
    warm(Engine(tower, graphs, capacity, device, EncoderMetrics()))
    return Engine(tower, graphs, capacity, device, series, packing)


def capture(
    tower: Tower,
    capacity: Capacity,
    device: Device,
    metrics: EncoderMetrics,
) -> dict[str, GraphSet]:
    """A captured GraphSet for each path; also sets the metrics. Raises StartError.

    On CUDA each path but the first has streams and a graph pool of its own, so that the paths of a
    pack are replayed at the same time.
    """
    started, before, used_before = monotonic(), device.memory_bytes(), device.used_bytes()
    total = sum(budget > 0 for budgets in capacity.budgets for budget in budgets)
    done = 0
    graphs = {}
    for path, budgets in zip(tower.spec.paths, capacity.budgets, strict=True):

        def report(budget: int, seconds: float, path: str = path) -> None:
            nonlocal done
            done += 1
            passed = monotonic() - started
            log.info(
                "captured %s/%d in %.2f s (%d of %d, about %.0f s left)",
                *(path, budget, seconds, done, total, passed / done * (total - done)),
            )

        where = device if path == tower.spec.paths[0] else device.beside()
        place = (tower, path, budgets, capacity.segments, where)
        most = capacity.exact_graphs
        try:
            graphs[path] = ExactGraphSet(*place, most) if most else GraphSet(*place)
            graphs[path].capture(report)
        except torch.OutOfMemoryError as error:
            raise StartError(
                f"out of device memory after {done} of {total} graphs, while those of path {path} "
                "were captured: lower the largest of graphs.token_budgets, or give the replica a "
                f"GPU of its own (encoder.num_gpus: 1). torch said: {error}"
            ) from error
        metrics.captured_graphs.labels(path).set(graphs[path].captured())
    ours = device.memory_bytes() - before
    metrics.graph_memory_bytes.set(ours)
    log.info(
        "captured %d budgets in %.1f s: %.2f GB of tensors, %.3f GB that CUDA keeps of graphs",
        *(total, monotonic() - started, ours / 1e9),
        (device.used_bytes() - used_before - ours) / 1e9,
    )
    return graphs


def choose_packing(options: PackingOptions, graphs: Mapping[str, GraphSet]) -> Packing:
    """The policy. `least_cost` measures each budget here, before anything has been staged.

    Without a choice of budgets (modes `exact` and `off`) both policies are the same.
    """
    choice = any(len(path.budgets) > 1 for path in graphs.values())
    if options.policy == "smallest_first" or not choice:
        return smallest_first
    costs = [monotone(path.replay_seconds()) for path in graphs.values()]
    for path, seconds in zip(graphs, costs, strict=True):
        shown = ", ".join(f"{budget} {each * 1000:.2f}" for budget, each in seconds.items())
        log.info("milliseconds of a replay, %s: %s", path, shown)
    # Traffic of few sizes asks about the same items again and again.
    cut = lru_cache(CACHED_PLANS)(partial(least_cost, costs=costs))
    return lambda plans, capacity: cut(tuple(plans), capacity)


def warm(engine: Engine) -> None:
    """Encodes one small image and closes the engine, so that what loads at first use is loaded."""
    grey = simplejpeg.encode_jpeg(np.full((64, 64, 3), 128, np.uint8))
    plan, patches = patchifier_of(engine.tower.spec).patchify(decode(grey))
    engine.submit(Item(plan, patches.numpy())).result()
    engine.close()


def open_device(kind: str) -> Device:
    """The device that this replica owns. Raises StartError where there is none."""
    if kind == "cpu":
        return Device()
    if not torch.cuda.is_available():
        raise StartError(
            "encoder.device is cuda, but torch sees no CUDA device in this replica: check the "
            "driver, encoder.num_gpus and that torch is a CUDA build, or set encoder.device to cpu"
        )
    from actors.engine.cuda import CudaDevice

    return CudaDevice()
