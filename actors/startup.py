"""From options to an engine that is ready: device, weights, graphs, packing, one warm-up image.

Knows nothing of Ray Serve, nor how images are decoded: the encoder actor, the engine's benchmarks
and a language model's worker (encoder_service/engines/vllm_local.py) start the same way.
"""

from __future__ import annotations

import torch

from actors.engine.budgets import model_capacity
from actors.engine.device import open_device
from actors.engine.engine import Engine, PacedEngine
from actors.engine.graphs import capture, choose_packing, more
from actors.errors import StartError
from actors.media.patchify import patchifier_of
from actors.models.load import load
from actors.options import ActorOptions
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Item


def open_engine(options: ActorOptions, series: EncoderMetrics, slice_seconds: float = 0) -> Engine:
    """An engine on the device of the options, every graph captured. Raises StartError.

    `slice_seconds`: see Device.
    """
    device = open_device(options.encoder.device, slice_seconds)
    if options.encoder.gpu_memory_bytes:
        device.limit(options.encoder.gpu_memory_bytes)
    captured = options.graphs.mode != "off"
    try:
        tower = load(options.model, device.device, captured=captured, blocks=options.graphs.blocks)
    except torch.OutOfMemoryError as error:
        raise StartError(
            f"out of device memory while weights were loaded: {more(device)}. torch said: {error}"
        ) from error
    capacity = model_capacity(options.graphs, tower.spec)
    graphs = capture(tower, capacity, device, series)
    packing = choose_packing(options.packing, graphs)
    kind = PacedEngine if device.pace else Engine
    # In an engine of its own, so that the metrics count only what clients sent.
    warm(kind(tower, graphs, capacity, device, EncoderMetrics()))
    return kind(tower, graphs, capacity, device, series, packing)


def warm(engine: Engine) -> None:
    """Encodes one small image and closes the engine, so that what loads at first use is loaded."""
    grey = torch.full((3, 64, 64), 128, dtype=torch.uint8)
    plan, patches = patchifier_of(engine.tower.spec).patchify(grey)
    engine.submit(Item(plan, patches.numpy())).result()
    engine.close()
