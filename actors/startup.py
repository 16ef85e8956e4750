"""Starts an engine from options: device, weights, graphs, packing, warm-up, measurement.

Does not depend on Ray Serve or on decoding, because the engine's benchmarks and a language model's
worker (encoder_service/engines/vllm_local.py) start the same way as the encoder actor.
"""

from __future__ import annotations

from dataclasses import asdict
from time import monotonic

import numpy as np
import torch

from actors.engine.budgets import model_capacity
from actors.engine.device import open_device
from actors.engine.engine import Engine
from actors.engine.graphs import capture, choose_packing, more
from actors.engine.packing import OpenPack, fitted
from actors.engine.traffic import learned
from actors.errors import StartError
from actors.media.patchify import patchifier_of
from actors.models.layers.weights import NO_FP8
from actors.models.load import load
from actors.models.precision import read_plan
from actors.options import ActorOptions
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Cost, Item, Size, Work

SIDES = [64 * 2**doublings for doublings in range(7)]
"""Side lengths of the square images that are measured, in pixels."""
MEASURED_PACKS = 2  # per size; the fastest counts


def open_engine(options: ActorOptions, series: EncoderMetrics, slice_seconds: float = 0) -> Engine:
    """Opens an engine on the configured device and captures every graph. Raises StartError.

    `slice_seconds`: see Device.
    """
    device = open_device(options.encoder.device, slice_seconds)
    if options.encoder.gpu_memory_bytes:
        device.limit(options.encoder.gpu_memory_bytes)
    captured = options.graphs.mode != "off"
    plan = read_plan(options.graphs, options.model, device.device)
    try:
        tower = load(
            options.model,
            device.device,
            captured=captured,
            blocks=options.graphs.blocks,
            fp8=plan.layers if plan else NO_FP8,
        )
    except torch.OutOfMemoryError as error:
        raise StartError(
            f"out of device memory while loading weights: {more(device)}. torch said: {error}"
        ) from error
    capacity = model_capacity(options.graphs, tower.spec)
    if options.graphs.sizes_file:
        capacity = learned(options.graphs.sizes_file, capacity, tower.spec)
    graphs = capture(tower, capacity, device, series)
    packing = choose_packing(options.packing, graphs)
    # With an engine and metrics of its own, so that the metrics count only what clients sent.
    cost = warm(Engine(tower, graphs, capacity, device, EncoderMetrics()))
    for of, seconds in asdict(cost).items() if cost else ():
        series.measured_seconds.labels(of.removesuffix("_seconds")).set(seconds)
    return Engine(tower, graphs, capacity, device, series, packing, cost)


def warm(engine: Engine) -> Cost | None:
    """Encodes a small item, so that everything lazily loaded is loaded, then measures the device
    and closes the engine. Nothing is measured (None) if replays are paced, or without captured
    budgets (`graphs.mode: exact` or `off`)."""
    plan, patches = patchifier_of(engine.tower.spec).example()
    engine.submit(Item(plan, patches.numpy())).result()
    captured = any(engine.capacity.budgets) and not engine.capacity.exact_graphs
    measurable = captured and not engine.device.pace
    cost = measure(engine, patches.shape[1]) if measurable else None
    engine.close()
    return cost


def measure(engine: Engine, patch_bytes: int) -> Cost | None:
    """Measures square images, one at a time, and on a GPU also a full pack of the smallest.
    None: no pack holds any of them."""
    began, most_seconds = monotonic(), engine.device.measuring_seconds
    sizing = engine.tower.spec.sizing
    work: list[Work] = []
    seconds: list[float] = []
    for plan in dict.fromkeys(sizing.plan(Size(side, side)) for side in SIDES):
        pack = OpenPack(engine.capacity)
        while pack.admits(plan):
            pack.add(0, plan)
        if not pack.items:
            continue
        if work and most_seconds and monotonic() - began > most_seconds:
            break
        for count in {1} if work or most_seconds else {1, len(pack.items)}:
            patches = np.zeros((plan.patches, patch_bytes), np.uint8)
            taken = []
            for _ in range(MEASURED_PACKS):
                answers = engine.submit_together([Item(plan, patches) for _ in range(count)])
                taken.append(answers[0].result().encode_seconds)
            work.append(Work.of([plan.work] * count))
            seconds.append(min(taken))
    return fitted(work, seconds) if work else None
