"""On a GPU, at full size: replays in slices are the whole, and hold up other work for a slice."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from statistics import median

import pytest
import torch

from actors.engine.budgets import Segments, capacity
from actors.engine.device import Device, open_device
from actors.engine.engine import Engine
from actors.engine.graphs import GraphSet, capture
from actors.engine.slices import STRETCH, Slice, Step
from actors.models.load import build, tensors
from actors.models.tower import Tower
from actors.options import GraphOptions, ModelOptions
from actors.telemetry.metrics import EncoderMetrics
from tests.gpu.test_graphs import item
from tests.gpu.towers import cuda, finished, published

pytestmark = pytest.mark.gpu

SLICE_SECONDS = 0.005
FULL = Step(1024, 0)
MODEL = "qwen3vl-8b"
FULL_HD, ULTRA_HD = (34, 60), (68, 120)  # tokens


def tower(device: torch.device) -> Tower:
    options, model = ModelOptions(id=MODEL, load_format="dummy"), published(MODEL)
    return build(model, tensors(options, model, device), device)


def sliced() -> Device:
    cuda()
    return open_device("cuda", SLICE_SECONDS)


@pytest.mark.alone
def test_slices_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if one layer takes twice as long as a slice."""
    whole, parts = cuda(), sliced()
    made = tower(whole.device)
    budgets = (64, 2048, 8192)
    images = [item(7, 9, seed=1), item(*FULL_HD, seed=2), item(*ULTRA_HD, seed=3)]
    pace, seconds = parts.pace, list[float]()
    assert pace is not None
    launch = pace.launch

    def watched(slices: Iterable[Slice]) -> None:
        seen = list(slices)
        seconds[:] = [each.seconds for each in seen]
        launch(seen)

    monkeypatch.setattr(pace, "launch", watched)
    rows = []
    for device in (whole, parts):
        graphs = GraphSet(made, "default", budgets, Segments(4), device)
        graphs.capture(lambda budget, seconds: None)
        rows.append(
            [finished(graphs.run(b, [one])) for b, one in zip(budgets, images, strict=True)]
        )
    assert all(map(torch.equal, *rows))
    told = f"4K: {len(seconds)} slices, {1000 * sum(seconds):.0f} ms, the longest"
    print(told, f"{1000 * max(seconds):.1f} ms; {[round(1000 * each, 1) for each in seconds]}")
    assert len(seconds) > made.spec.vision["depth"]
    assert max(seconds) < 1.5 * SLICE_SECONDS


@pytest.mark.alone
def test_steps_are_held_up_for_one_slice_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices are expected to take twice as long as they do, until they have been measured."""
    device = sliced()
    made = tower(device.device)
    limits = capacity(GraphOptions(token_budgets=(2048,)), (64, 16384), 0)
    graphs = capture(made, limits, device, EncoderMetrics())
    engine = Engine(made, graphs, limits, device, EncoderMetrics())
    image = replace(item(*FULL_HD, seed=2), on_device=True)  # to the host, it would be pinned first
    alone = engine.submit(replace(image)).result(60).rows
    x = torch.randn(8192, 8192, device=device.device, dtype=torch.bfloat16)

    pace = device.pace
    assert pace is not None

    def steps(count: int) -> list[float]:
        """Milliseconds from the end of one to the end of the next."""
        ends = []
        for _ in range(count):
            pace.step_launched()
            pace.step(FULL)
            for _ in range(4):
                x.mm(x)
            ends.append(torch.cuda.Event(enable_timing=True))
            ends[-1].record()
            if len(ends) > 1:
                ends[-2].synchronize()  # as vLLM runs one step ahead
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in pairwise(ends)]

    launch, slower, at_start = pace.launch, list[Slice](), list[float]()

    def launch_slower(slices: Iterable[Slice]) -> None:
        slower.extend(Slice(each.launch, 2 * each.seconds) for each in slices)
        at_start.extend(each.seconds for each in slower)
        launch(slower)

    monkeypatch.setattr(pace, "launch", launch_slower)
    before = median(steps(20))
    answer = engine.submit(image)
    beside = steps(60)
    assert answer.done()
    assert torch.equal(answer.result().rows, alone)
    free = max(before, median(steps(20)))  # a lower clock makes all steps longer
    held = [each - free for each in beside if each > free + 0.5]
    measured = 1000 * pace.times.room(FULL, STRETCH)[0] / (STRETCH - 1)
    assert 0.8 * before < measured < 1.1 * free
    print(f"a step {free:.1f} ms; held up: {[round(each, 1) for each in held]} ms")
    assert 4 <= len(held) <= 20
    assert max(held) < 2000 * SLICE_SECONDS
    pace.step_launched()
    found = [each.seconds / expected for each, expected in zip(slower, at_start, strict=True)]
    print(f"slices, measured: {[round(2 * each, 2) for each in found]} of what they took at start")
    assert sum(each < 0.75 for each in found) > len(found) / 2
    engine.close()
