"""Graphs by exact layout: first sight eager, second captured, bounded, the right rows always."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from actors.engine.budgets import MOST_EXACT_GRAPHS, Capacity, capacity, graduated
from actors.engine.device import Device
from actors.engine.engine import Engine
from actors.engine.graphs import SIGHTS_PER_GRAPH, ExactGraphSet, capture, choose_packing
from actors.engine.packing import smallest_first
from actors.kernels.attention import Values
from actors.options import GraphOptions, PackingOptions
from actors.telemetry.metrics import EncoderMetrics
from tests.toy_tower import ToyTower, toy_item, toy_rows

MOST = 3
LARGEST = 64
CAPACITY = Capacity(((LARGEST,),), (LARGEST,), items=8, frames=0, exact_graphs=MOST)


@pytest.fixture
def graphs() -> ExactGraphSet:
    return captured()


def captured(device: Device | None = None) -> ExactGraphSet:
    graphs = capture(ToyTower(), CAPACITY, device or Device(), EncoderMetrics())["default"]
    assert isinstance(graphs, ExactGraphSet)
    return graphs


def serve(graphs: ExactGraphSet, *tokens: int, seed: int = 0) -> str | None:
    """One pack of items of so many tokens, checked; the label of the graph that served it."""
    items = [toy_item(n, seed + i) for i, n in enumerate(tokens)]
    budget = LARGEST if sum(tokens) <= LARGEST else None
    label = graphs.label(budget, [item.plan for item in items])
    rows = graphs.run(budget, items)
    assert torch.equal(rows, torch.cat([toy_rows(item) for item in items]))
    return label


def test_first_sight_runs_eagerly_and_the_second_replays(graphs: ExactGraphSet) -> None:
    assert [serve(graphs, 5, 9, seed=s) for s in range(3)] == [None, "exact", "exact"]
    assert graphs.captured() == 1


def test_a_layout_is_its_grids_in_order(graphs: ExactGraphSet) -> None:
    serve(graphs, 5, 9)
    assert [serve(graphs, 9, 5), serve(graphs, 14), serve(graphs, 5)] == [None, None, None]
    assert graphs.captured() == 0


def test_a_layout_is_captured_once(graphs: ExactGraphSet) -> None:
    before = graphs.tower.forwards  # type: ignore[attr-defined]
    for seed in range(5):
        serve(graphs, 7, seed=seed)
    # One eagerly, and four replays, which the CPU runs as forwards.
    assert graphs.tower.forwards - before == 1 + 4  # type: ignore[attr-defined]


def test_what_is_beyond_the_largest_budget_is_never_captured(graphs: ExactGraphSet) -> None:
    assert [serve(graphs, LARGEST + 1, seed=s) for s in range(3)] == [None, None, None]
    assert not graphs.seen
    assert not graphs.kept


def test_the_layout_unused_for_longest_makes_room(graphs: ExactGraphSet) -> None:
    for tokens in (1, 2, 3):
        serve(graphs, tokens)
        serve(graphs, tokens)
    serve(graphs, 1)
    serve(graphs, 4)
    assert serve(graphs, 4) == "exact"
    assert [serve(graphs, tokens) for tokens in (1, 3)] == ["exact", "exact"]
    assert serve(graphs, 2) is None
    assert graphs.captured() == MOST


@settings(max_examples=20)
@given(st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=4), max_size=150))
def test_memory_is_bounded_and_rows_are_right(packs: list[list[int]]) -> None:
    graphs = captured()
    for number, tokens in enumerate(packs):
        serve(graphs, *tokens, seed=number)
        assert len(graphs.kept) <= MOST
        assert len(graphs.seen) <= MOST * SIGHTS_PER_GRAPH
        assert not graphs.kept.keys() & graphs.seen.keys()


class Running(Device):
    """Runs once for each capture, as a GPU does."""

    def capture(
        self, run: Callable[[], Tensor], *, kept: bool, tuned: bool
    ) -> Callable[[], Tensor]:
        run()
        return run


def test_a_layout_that_cannot_be_captured_starts_again() -> None:
    graphs = captured(Running())
    serve(graphs, 5)
    with pytest.raises(ValueError, match="poisoned"):
        graphs.run(LARGEST, [toy_item(5, 1, poisoned=True)])
    assert [serve(graphs, 5), serve(graphs, 5)] == [None, "exact"]


def test_the_engine_counts_first_sights_and_exact_hits() -> None:
    metrics = EncoderMetrics()
    tower, device = ToyTower(), Device()
    graphs = capture(tower, CAPACITY, device, metrics)
    packing = choose_packing(PackingOptions(policy="least_cost"), graphs)
    assert packing is smallest_first  # no budgets, no choice
    engine = Engine(tower, graphs, CAPACITY, device, metrics, packing)
    sources: list[str] = []
    for tokens in (6, 6, 6, LARGEST + 1):
        item = toy_item(tokens, seed=len(sources))
        encoded = engine.submit(item).result(10)
        assert torch.equal(encoded.rows, toy_rows(item))
        sources.append(encoded.source)
    engine.close()

    def sample(name: str, **labels: str) -> float | None:
        labels["path"] = "default"
        return metrics.registry.get_sample_value(f"encoder_{name}", labels)

    assert sources == ["eager", "graph", "graph", "eager"]
    assert sample("graph_hits_total", budget="exact", backend="cpu") == 2
    assert sample("graph_misses_total", reason="first_sight") == 1
    assert sample("graph_misses_total", reason="beyond_budgets") == 1
    assert sample("padded_tokens_total") is None
    assert sample("captured_graphs") == 1


class Noting(Device):
    """Notes which captures may time products."""

    def __init__(self) -> None:
        self.tuned: list[bool] = []

    def capture(
        self, run: Callable[[], Tensor], *, kept: bool, tuned: bool
    ) -> Callable[[], Tensor]:
        self.tuned.append(tuned)
        return super().capture(run, kept=kept, tuned=tuned)


def test_nothing_is_timed_for_a_layout_that_comes_while_others_wait() -> None:
    device = Noting()
    graphs = capture(ToyTower(), CAPACITY, device, EncoderMetrics())["default"]
    assert isinstance(graphs, ExactGraphSet)
    serve(graphs, 5)
    serve(graphs, 5)
    assert device.tuned == [False, False]
    budgets = Capacity(((4, 16),), (16,), items=8, frames=0)
    capture(ToyTower(), budgets, device, EncoderMetrics())
    assert device.tuned[2:] == [True, True]


def test_the_options_of_mode_exact() -> None:
    made = capacity(GraphOptions(mode="exact"), (64, 1024), 0)
    assert (made.budgets, made.tokens, made.items) == (((1024,),), (1024,), 16)
    assert made.exact_graphs == MOST_EXACT_GRAPHS
    assert capacity(GraphOptions(), (64, 1024), 0).exact_graphs == 0


class Slow(ToyTower):
    """A forward takes a millisecond, and a tenth of one for each token, by its own clock."""

    now = 0.0

    def forward(self, path: str, values: Values) -> Tensor:
        self.now += 0.001 + len(values["patches"]) / 4 / 10_000
        return super().forward(path, values)


def test_a_cpu_does_not_run_every_budget_before_items_come(monkeypatch: pytest.MonkeyPatch) -> None:
    ladder = graduated(4, 16_384, 8, 4)
    budgets = Capacity((ladder,), (16_384,), items=8, frames=0)
    device, tower = Device(), Slow()
    device.measuring_seconds = 0.03
    monkeypatch.setattr("actors.engine.graphs.perf_counter", lambda: tower.now)
    graphs = capture(tower, budgets, device, EncoderMetrics())
    assert tower.forwards == 0
    packing = choose_packing(PackingOptions(), graphs)
    assert 0 < tower.forwards < 4 * 30 < 4 * len(ladder)
    alike = [toy_item(8, seed).plan for seed in range(4)]
    assert [len(pack.items) for pack in packing(alike, budgets)] == [4]
    mixed = [toy_item(tokens, 0).plan for tokens in (4096, 4100)]  # 9216, or 4096 and 4608
    assert [len(pack.items) for pack in packing(mixed, budgets)] == [1, 1]


def test_every_budget_is_measured_before_items_come() -> None:
    budgets = Capacity(((4, 16, LARGEST),), (LARGEST,), items=8, frames=0)
    graphs = capture(ToyTower(), budgets, Device(), EncoderMetrics())
    seconds = graphs["default"].replay_seconds()
    assert sorted(seconds) == [4, 16, LARGEST]
    assert all(0 < each < 1 for each in seconds.values())
    packing = choose_packing(PackingOptions(), graphs)
    assert packing is not smallest_first
    packs = packing([toy_item(4, 0).plan] * 3, budgets)
    assert sorted(i for pack in packs for i in pack.items) == [0, 1, 2]
