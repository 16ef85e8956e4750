"""Graphs of one pool write over each other's outputs on CUDA. Here as well, for these tests."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from actors import startup
from actors.engine.budgets import Capacity, Segments
from actors.engine.device import Device
from actors.engine.engine import Engine
from actors.engine.graphs import ExactGraphSet, GraphSet, capture
from actors.errors import StartError
from actors.models.load import load
from actors.options import ActorOptions, EncoderOptions, GraphOptions, ModelOptions
from actors.telemetry.metrics import EncoderMetrics
from tests.toy_two_paths import TwoPathToy, two_path_item, two_path_rows

BUDGETS = Capacity(((4, 8), (0, 2, 6)), (8, 6), items=5, frames=0)
EXACT = Capacity(((8,), (6,)), (8, 6), items=5, frames=0, exact_graphs=4)


class Pool(Device):
    """A replay writes over the outputs of graphs captured later, and over all that are not kept."""

    def __init__(self) -> None:
        self.outputs: list[tuple[Tensor, bool]] = []

    def beside(self) -> Device:
        return Pool()

    def capture(
        self, run: Callable[[], Tensor], *, kept: bool, tuned: bool
    ) -> Callable[[], Tensor]:
        output = run()
        place = len(self.outputs)
        if all(other.data_ptr() != output.data_ptr() for other, _ in self.outputs):
            self.outputs.append((output, kept))

        def replay() -> Tensor:
            for index, (other, safe) in enumerate(self.outputs):
                if index > place or not (safe or index == place):
                    other.fill_(math.nan)
            rows = run()
            if rows.data_ptr() != output.data_ptr():
                output.copy_(rows)
            return output

        return replay


class Full(Device):
    """Without room for a graph."""

    def limit(self, size_bytes: int) -> None:
        self.limit_bytes = size_bytes

    def capture(
        self, run: Callable[[], Tensor], *, kept: bool, tuned: bool
    ) -> Callable[[], Tensor]:
        raise torch.OutOfMemoryError("no room")


@pytest.mark.parametrize(
    ("limit", "remedy"), [(None, r"encoder\.num_gpus: 1"), (900, "gpu_memory_bytes, which is 900")]
)
@pytest.mark.parametrize("weights_fit", [True, False])
def test_too_little_memory_names_what_to_change(
    limit: int | None, remedy: str, weights_fit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(startup, "open_device", lambda *_: Full())
    if not weights_fit:
        monkeypatch.setattr(startup, "load", too_large)
    options = ActorOptions(
        model=ModelOptions(id="qwen3vl-tiny", load_format="dummy", dtype="float32"),
        encoder=EncoderOptions(num_gpus=0, device="cpu", gpu_memory_bytes=limit),
        graphs=GraphOptions(token_budgets=(16,)),
    )
    with pytest.raises(StartError, match=remedy) as told:
        startup.open_engine(options, EncoderMetrics())
    assert ("graphs.token_budgets" in str(told.value)) == weights_fit


@pytest.mark.parametrize("capacity", [BUDGETS, EXACT], ids=["budgets", "exact"])
def test_what_one_path_put_out_outlasts_the_other(capacity: Capacity) -> None:
    tower, device, metrics = TwoPathToy(), Pool(), EncoderMetrics()
    graphs = capture(tower, capacity, device, metrics)
    engine = Engine(tower, graphs, capacity, device, metrics)
    items = [two_path_item(1 + n % 9, n % 7, n) for n in range(60)]
    answers = [engine.submit(item) for item in items + items]
    for item, answer in zip(items + items, answers, strict=True):
        assert torch.equal(answer.result(30).rows, two_path_rows(item))
    engine.close()


def test_exact_layouts_keep_one_graph_beside_them() -> None:
    tower = load(ModelOptions(id="qwen3vl-tiny", load_format="dummy"), torch.device("cpu"))
    place = (tower, "default", (64,), Segments(4, 2), Device())
    for graphs, forms in ((GraphSet(*place), 2), (ExactGraphSet(*place, 3), 1)):
        graphs.capture(lambda budget, seconds: None)
        assert len(graphs.replays) == forms
        assert "later" in graphs.inputs.tensors
