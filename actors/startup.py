"""From options to an engine that is ready: device, weights, graphs, packing, one image to warm up.

Knows nothing of Ray: the encoder actor and the benchmark of the engine alone start the same way.
"""

from __future__ import annotations

import os

import numpy as np
import simplejpeg
import torch

from actors.engine.capture import capture, choose_packing
from actors.engine.device import CpuDevice, Device
from actors.engine.engine import Engine
from actors.engine.two_paths import model_capacity
from actors.errors import StartError
from actors.media.decode_processes import DecodeProcesses
from actors.media.decoding import Decoding
from actors.media.image import decode
from actors.media.patchify import patchifier_of
from actors.models.load import load
from actors.options import ActorOptions
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Item


def open_engine(options: ActorOptions, series: EncoderMetrics) -> Engine:
    """An engine on the device of the options, every graph captured. Raises StartError."""
    device = open_device(options.encoder.device)
    captured, compiled = options.graphs.mode != "off", options.graphs.compile
    tower = load(options.model, device.device, captured=captured, compiled=compiled)
    capacity = model_capacity(options.graphs, tower.spec)
    graphs = capture(tower, capacity, device, series, path_streams=options.graphs.path_streams)
    packing = choose_packing(options.packing, graphs)
    # Through an engine of its own, so that the metrics count what clients sent alone.
    warm(Engine(tower, graphs, capacity, device, EncoderMetrics()))
    return Engine(tower, graphs, capacity, device, series, packing)


def open_beside(options: ActorOptions, series: EncoderMetrics) -> DecodeProcesses | None:
    """Starts the processes that decode, if there are to be any: before the engine, which takes long
    as well. Raises CheckpointError, or StartError where there can be none."""
    if not options.preprocess.processes:
        return None
    if not hasattr(os, "memfd_create"):
        raise StartError("preprocess.processes takes Linux: set it to 0")
    stuck_seconds = options.encoder.max_stall_seconds
    return DecodeProcesses(options.model, options.preprocess, stuck_seconds, series)


def open_decoding(
    options: ActorOptions,
    engine: Engine,
    series: EncoderMetrics,
    beside: DecodeProcesses | None,
) -> Decoding:
    """What makes items for an engine, on the device of the options. Raises StartError.

    `beside`: as open_beside gave it for these options.
    """
    patchifier, together = patchifier_of(engine.tower.spec), None
    if options.preprocess.device == "cuda":
        from actors.media.nvjpeg import open_nvjpeg

        together = open_nvjpeg(patchifier, engine.device.device)
    if beside:
        beside.wait_until_started()
    return Decoding(patchifier, options.preprocess.threads, series, together, beside)


def warm(engine: Engine) -> None:
    """One small image all the way, then closes: what loads at first use is loaded afterwards."""
    grey = simplejpeg.encode_jpeg(np.full((64, 64, 3), 128, np.uint8))
    plan, patches = patchifier_of(engine.tower.spec).patchify(decode(grey))
    engine.submit(Item(plan, patches)).result()
    engine.close()


def open_device(kind: str) -> Device:
    """The device that this replica owns. Raises StartError where there is none."""
    if kind == "cpu":
        return CpuDevice()
    if not torch.cuda.is_available():
        raise StartError(
            "encoder.device is cuda, but torch sees no CUDA device in this replica: check the "
            "driver, encoder.num_gpus and that torch is a CUDA build, or set encoder.device to cpu"
        )
    from actors.engine.cuda import CudaDevice

    return CudaDevice()
