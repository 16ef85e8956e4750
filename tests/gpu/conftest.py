"""Towers at their published sizes with random weights, captured once for all these tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from actors.engine.budgets import Capacity, model_capacity
from actors.engine.device import Device
from actors.engine.graphs import GraphSet, capture
from actors.models.load import load
from actors.models.tower import Tower
from actors.options import GraphOptions, ModelOptions
from actors.telemetry.metrics import EncoderMetrics
from tests.gpu.towers import cuda

PRESETS = ("qwen3vl-2b", "qwen3vl-8b")


@dataclass(frozen=True)
class Captured:
    """A tower with all its graphs."""

    tower: Tower
    reference: Tower
    capacity: Capacity
    graphs: dict[str, GraphSet]
    device: Device
    metrics: EncoderMetrics
    used_bytes: int
    """What all graphs took of the device, the driver's part included."""


@pytest.fixture(scope="session", params=PRESETS)
def captured(request: pytest.FixtureRequest) -> Iterator[Captured]:
    """bfloat16 on the GPU, and the same weights in float32 in the reference form."""
    device, metrics = cuda(), EncoderMetrics()
    options = ModelOptions(id=request.param, load_format="dummy", dtype="bfloat16")
    tower = load(options, device.device)
    limits = model_capacity(GraphOptions(), tower.spec)  # a second graph a budget, for videos
    before = device.used_bytes()
    graphs = capture(tower, limits, device, metrics)
    used_bytes = device.used_bytes() - before
    reference = load(options.model_copy(update={"dtype": "float32"}), device.device)
    yield Captured(tower, reference, limits, graphs, device, metrics, used_bytes)
    graphs.clear()
    torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _alone(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("alone") and "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("measures the whole GPU: run it without -n, as `-m 'gpu and alone'`")


@pytest.fixture
def on_device() -> Iterator[None]:
    """What a test makes lies on the GPU, the same in every run."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.manual_seed(0)
    with torch.device("cuda"):
        yield
