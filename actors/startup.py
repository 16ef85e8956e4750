"""From options to a pipeline that is ready: device, weights, graphs, packing, one warm-up image.

Knows nothing of Ray Serve: the encoder actor and the engine's benchmarks start the same way.
"""

from __future__ import annotations

import numpy as np
import simplejpeg

from actors.engine.budgets import model_capacity
from actors.engine.device import open_device
from actors.engine.engine import Engine
from actors.engine.graphs import capture, choose_packing
from actors.media.decoder import Decoder
from actors.media.image import decode
from actors.media.patchify import patchifier_of
from actors.models.load import load
from actors.options import ActorOptions
from actors.pipeline import Pipeline
from actors.store.kept import EmbeddingCache, References
from actors.store.nixl import DeviceMemory
from actors.store.writer import RowWriter
from actors.telemetry.metrics import EncoderMetrics
from actors.telemetry.tracing import Spans
from actors.types import Item


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


def warm(engine: Engine) -> None:
    """Encodes one small image and closes the engine, so that what loads at first use is loaded."""
    grey = simplejpeg.encode_jpeg(np.full((64, 64, 3), 128, np.uint8))
    plan, patches = patchifier_of(engine.tower.spec).patchify(decode(grey))
    engine.submit(Item(plan, patches.numpy())).result()
    engine.close()
