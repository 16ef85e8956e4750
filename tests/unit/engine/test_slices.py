"""Chunked encoding: what is launched before a step, and that slices are the whole."""

from __future__ import annotations

import threading
from pathlib import Path
from time import monotonic, sleep

import pytest
import torch
from torch import Tensor

from actors.engine import slices
from actors.engine.budgets import Capacity, Segments
from actors.engine.device import Device
from actors.engine.engine import PacedEngine
from actors.engine.graphs import GraphSet, capture
from actors.engine.slices import Pace, layers_per_slice
from actors.media.patchify import patchifier_of
from actors.models.layers.block import numbered
from actors.models.load import load
from actors.options import ModelOptions
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Item
from tests.small_presets import SMALL, write_small
from tests.toy_tower import ToyTower, toy_item, toy_rows


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no failure: a step waits longer for slices than it would for a device."""
    monkeypatch.setattr(slices, "MOST_LAUNCH_SECONDS", 30.0)


class Recorded(Pace):
    """On a device that is as busy as the test says. Writes down what was launched."""

    def __init__(self, slice_seconds: float) -> None:
        super().__init__(slice_seconds)
        self.free = False
        self.seen: list[str] = []

    def begin(self, seconds: float) -> None:
        super().begin(seconds)
        self.seen.append("slice")

    def idle(self) -> bool:
        return self.free

    def after_steps(self) -> None:
        self.seen.append("after")

    def before_step(self) -> None:
        self.seen.append("step")

    def asked(self) -> None:
        """Waits until the engine's thread does."""
        end = monotonic() + 10
        while not self._asking:
            assert monotonic() < end
            sleep(0.001)


def replay(pace: Recorded, *seconds: float) -> threading.Thread:
    """The engine's thread, with slices that take this long."""

    def run() -> None:
        for each in seconds:
            pace.begin(each)
        pace.end()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_step_waits_for_as_many_slices_as_fit() -> None:
    pace = Recorded(5)
    thread = replay(pace, *[2] * 12)
    for share in (1, 1, 3, 1):
        pace.asked()
        pace.step(share)
    thread.join(10)
    at_most = [["after", *["slice"] * slices, "step"] for slices in (2, 2, 7, 1)]
    assert pace.seen == [one for step in at_most for one in step]


def test_a_slice_that_never_fits_is_launched_alone() -> None:
    pace = Recorded(1)
    thread = replay(pace, 4, 4)
    for _ in range(2):
        pace.asked()
        pace.step()
    thread.join(10)
    assert pace.seen == ["after", "slice", "step"] * 2


def test_a_step_waits_for_nothing_when_no_slice_is_ready() -> None:
    pace = Recorded(5)
    pace.step()
    assert pace.seen == ["step"]


def test_without_steps_slices_need_none() -> None:
    pace = Recorded(1)
    thread = replay(pace, *[4] * 3)
    pace.asked()
    assert pace.seen == []
    pace.free = True
    thread.join(10)
    assert pace.seen == ["slice"] * 3


def test_one_step_may_wait_for_several_packs_which_are_completed_meanwhile() -> None:
    capacity = Capacity(((64,),), (64,), items=1, frames=0)
    tower, device, metrics = ToyTower(), Device(), EncoderMetrics()
    pace = device.pace = Recorded(0.004)
    engine = PacedEngine(
        tower, capture(tower, capacity, device, metrics), capacity, device, metrics
    )
    answers = [engine.submit(toy_item(4, seed)) for seed in range(3)]
    pace.asked()
    pace.step()
    rows = [answer.result(10).rows for answer in answers]
    assert pace.seen == ["after", *["slice"] * 3, "step"]
    last = engine.submit(toy_item(4, 3))
    pace.asked()  # and nothing holds back what has been encoded before
    assert all(map(torch.equal, rows, map(toy_rows, (toy_item(4, seed) for seed in range(3)))))
    pace.free = True
    assert last.result(10)
    engine.close()


@pytest.mark.parametrize(
    ("milliseconds", "layers", "seconds"),
    [(5.1, 5, 0.005), (4.6, 5, 0.005), (0.1, 1, 0.001), (1000, 27, 0.027)],
)
def test_as_many_layers_as_fit(
    monkeypatch: pytest.MonkeyPatch, milliseconds: float, layers: int, seconds: float
) -> None:
    clock = 0.0

    def forward() -> None:
        nonlocal clock
        for _ in numbered(range(27)):
            clock += 0.001

    monkeypatch.setattr(slices, "perf_counter", lambda: clock)
    chosen, taken = layers_per_slice(forward, milliseconds / 1000)
    assert chosen == layers
    assert taken == pytest.approx(seconds)


class Counting(Pace):
    begun = 0

    def begin(self, seconds: float) -> None:
        self.begun += 1
        super().begin(seconds)


EVERY_RUN = ("clip-vit-l-336", "qwen25vl-7b", "step3vl-10b")
"""One of each kind of tower."""


@pytest.mark.parametrize(
    "preset",
    [
        pytest.param(preset, marks=() if preset in EVERY_RUN else pytest.mark.extended)
        for preset in sorted(SMALL)
    ],
)
def test_slices_of_every_family_are_the_whole(preset: str, tmp_path: Path) -> None:
    folder = write_small(tmp_path, preset)
    options = ModelOptions(id=str(folder), load_format="dummy", dtype="float32")
    tower = load(options, torch.device("cpu"))
    picture = torch.arange(3 * 120 * 90).mul_(7).remainder_(251).byte().view(3, 120, 90)
    plan, patches = patchifier_of(tower.spec).patchify(picture)
    item, pace, sliced = Item(plan, patches.numpy()), Counting(1e-9), Device()
    sliced.pace = pace

    def encoded(device: Device) -> Tensor:
        outputs = []
        for path, tokens in zip(tower.spec.paths, plan.path_tokens, strict=True):
            graphs = GraphSet(tower, path, (tokens,) if tokens else (), Segments(4), device)
            graphs.capture(lambda budget, seconds: None)
            outputs.append(graphs.run(tokens or None, [item]))
        return tower.postprocess(outputs, [plan])

    whole = encoded(Device())
    assert pace.begun == 0
    assert torch.equal(encoded(sliced), whole)
    assert pace.begun >= 2  # layers are slices
