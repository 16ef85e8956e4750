"""Global and local: budgets of each, what binds a pack, and the four outcomes of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial

import pytest
import torch

from actors.engine.budgets import MOST_EXACT_GRAPHS, Capacity, model_capacity, two_path_capacity
from actors.engine.device import Device
from actors.engine.engine import Engine
from actors.engine.graphs import capture, choose_packing
from actors.engine.packing import Packing, graphs_hold, least_cost, smallest_first
from actors.errors import ConfigError
from actors.families.registry import read
from actors.options import GraphOptions, ModelOptions, PackingOptions
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Item, Size
from tests.toy_two_paths import TwoPathToy, two_path_item, two_path_rows

OCR = (272, 100)
"""DeepSeek-OCR: 16 rows of 16 tokens and a newline; 10 rows of 10."""

SMALL = Capacity(((4, 8), (0, 2, 6)), (8, 6), items=5, frames=0)


def test_budgets_are_whole_images_and_whole_crops_up_to_one_maximum() -> None:
    made = two_path_capacity(GraphOptions(token_budgets=(13824,)), OCR)
    assert made.budgets == (
        (272, 544, 1088, 2176, 4352, 8704, 13824),
        (0, 100, 200, 400, 800, 1600, 3200, 6400, 12800),
    )
    assert (made.tokens, made.items, made.frames) == ((13824, 12800), 50, 0)
    assert made == two_path_capacity(GraphOptions(), OCR)


@pytest.mark.parametrize("preset", ["step3-321b", "step3vl-10b"])
def test_large_towers_take_less_by_default_and_still_the_largest_image(preset: str) -> None:
    spec = read(ModelOptions(id=preset, load_format="dummy"))
    made = model_capacity(GraphOptions(), spec)
    assert made.budgets == (
        (169, 338, 676, 1352, 2704, 5408),
        (0, 81, 162, 324, 648, 1296, 2592, 5184),
    )
    assert made.items == 32
    longest = (spec.sizing.plan(Size(3024, height)) for height in (3024, 2520, 600, 504, 100, 16))
    assert all(graphs_hold(plan, made) for plan in longest)
    asked = model_capacity(GraphOptions(token_budgets=(13824,)), spec)
    assert (asked.tokens, asked.items) == ((13824, 10368), 81)


def test_the_largest_given_budget_is_the_maximum_of_both() -> None:
    made = two_path_capacity(GraphOptions(token_budgets=(64, 1000)), OCR)
    assert made.budgets == ((272, 544, 1000), (0, 100, 200, 400, 800))


def test_each_path_can_be_given_its_own() -> None:
    given = GraphOptions(global_token_budgets=(544,), local_token_budgets=(300, 900))
    made = two_path_capacity(given, OCR)
    assert (made.budgets, made.tokens, made.items) == (((544,), (0, 300, 900)), (544, 900), 2)
    zero = given.model_copy(update={"local_token_budgets": (0, 300, 900)})
    assert two_path_capacity(zero, OCR) == made


def test_modes_without_budgets_keep_the_limits() -> None:
    off = two_path_capacity(GraphOptions(mode="off"), OCR)
    assert (off.budgets, off.tokens) == (((), ()), (13824, 12800))
    exact = two_path_capacity(GraphOptions(mode="exact"), OCR)
    assert (exact.budgets, exact.exact_graphs) == (((13824,), (12800,)), MOST_EXACT_GRAPHS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_token_budgets": (544, 272)}, "graphs.global_token_budgets must ascend"),
        ({"local_token_budgets": (200, 200)}, "graphs.local_token_budgets must ascend"),
        ({"global_token_budgets": (200,)}, "200 is less than one view's 272 tokens"),
        ({"local_token_budgets": (50, 100)}, "50 is less than one view's 100 tokens"),
        ({"token_budgets": (271,)}, "271 is less than the 272 tokens of one view"),
        ({"max_frames_per_batch": 4}, "the model takes no video"),
    ],
)
def test_budgets_that_cannot_be(options: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        two_path_capacity(GraphOptions(**options), OCR)  # type: ignore[arg-type]


def test_a_model_of_one_path_takes_no_budgets_of_two() -> None:
    spec = read(ModelOptions(id="qwen3vl-tiny", load_format="dummy"))
    with pytest.raises(ConfigError, match=r"local_token_budgets: qwen3vl-tiny has one path"):
        model_capacity(GraphOptions(local_token_budgets=(0, 64)), spec)


def test_both_budgets_bind_a_pack() -> None:
    fits = [two_path_item(2, 2, 0).plan, two_path_item(2, 3, 0).plan]
    assert [pack.budgets for pack in smallest_first(fits, SMALL)] == [(4, 6)]
    local = [two_path_item(1, 4, 0).plan] * 2
    assert [pack.budgets for pack in smallest_first(local, SMALL)] == [(4, 6)] * 2
    whole = [two_path_item(5, 1, 0).plan] * 2
    assert [pack.budgets for pack in smallest_first(whole, SMALL)] == [(8, 2)] * 2


class Rig:
    """An engine over the toy of two paths."""

    def __init__(self, capacity: Capacity, packing: Packing = smallest_first) -> None:
        self.metrics, self.tower, device = EncoderMetrics(), TwoPathToy(), Device()
        self.graphs = capture(self.tower, capacity, device, self.metrics)
        self.engine = Engine(self.tower, self.graphs, capacity, device, self.metrics, packing)

    def encode(self, *items: Item) -> list[Item]:
        """Answers, each of which must be its item's own rows."""
        with self.engine._changed:  # takes none until all are there
            answers = [self.engine.submit(item) for item in items]
        encoded = [answer.result(30) for answer in answers]
        for item, one in zip(items, encoded, strict=True):
            assert torch.equal(one.rows, two_path_rows(item))
        return encoded

    def outcomes(self) -> dict[str, float]:
        return {
            sample.labels["outcome"]: sample.value
            for family in self.metrics.pack_outcomes.collect()
            for sample in family.samples
            if sample.name.endswith("_total")
        }

    def sample(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"encoder_{name}", labels) or 0.0

    def hits(self, path: str, budget: str) -> float:
        return self.sample("graph_hits_total", path=path, budget=budget, backend="cpu")

    def misses(self, path: str, reason: str) -> float:
        return self.sample("graph_misses_total", path=path, reason=reason)


class Lanes(Device):
    """Writes down in which order its lanes run."""

    def __init__(self, log: list[str], name: str = "here") -> None:
        self.log, self.name = log, name

    def beside(self) -> Device:
        return Lanes(self.log, "beside")

    def fork(self) -> None:
        self.log.append("fork")

    def join(self) -> None:
        self.log.append("join")

    def running(self) -> AbstractContextManager[object]:
        self.log.append(self.name)
        return super().running()


def test_the_second_path_is_forked_before_and_joined_after() -> None:
    log: list[str] = []
    device, tower, metrics = Lanes(log), TwoPathToy(), EncoderMetrics()
    graphs = capture(tower, SMALL, device, metrics)
    log.clear()
    engine = Engine(tower, graphs, SMALL, device, metrics)
    item = two_path_item(3, 2, 1)
    assert torch.equal(engine.submit(item).result(30).rows, two_path_rows(item))
    engine.close()
    assert log == ["fork", "here", "beside", "join", "here"]


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(SMALL)
    yield rig
    rig.engine.close()


def test_graph_and_graph(rig: Rig) -> None:
    (one,) = rig.encode(two_path_item(3, 2, 1))
    assert (one.source, rig.outcomes()) == ("graph", {"graph/graph": 1})
    assert (rig.hits("global", "4"), rig.hits("local", "2")) == (1, 1)
    assert rig.sample("padded_tokens_total", path="global") == 1
    assert rig.sample("captured_graphs", path="local") == 2


def test_graph_and_skip(rig: Rig) -> None:
    (one,) = rig.encode(two_path_item(5, 0, 2))
    assert (one.source, rig.outcomes()) == ("graph", {"graph/skip": 1})
    assert (rig.hits("global", "8"), rig.hits("local", "0")) == (1, 0)


def test_eager_and_graph(rig: Rig) -> None:
    (one,) = rig.encode(two_path_item(9, 6, 3))
    assert (one.source, rig.outcomes()) == ("eager", {"eager/graph": 1})
    assert (rig.misses("global", "beyond_budgets"), rig.hits("local", "6")) == (1, 1)


def test_eager_and_eager(rig: Rig) -> None:
    (one,) = rig.encode(two_path_item(9, 7, 4))
    assert (one.source, rig.outcomes()) == ("eager", {"eager/eager": 1})
    assert rig.misses("global", "beyond_budgets") == rig.misses("local", "beyond_budgets") == 1


def test_a_pack_counts_an_item_on_the_paths_that_it_has(rig: Rig) -> None:
    rig.encode(two_path_item(2, 0, 5), two_path_item(2, 3, 6), two_path_item(2, 0, 7))
    assert rig.hits("global", "8") + rig.hits("global", "4") == 3
    assert rig.hits("local", "6") == 1


@pytest.mark.parametrize("policy", ["smallest_first", "least_cost"])
def test_every_item_gets_its_own_rows(policy: str) -> None:
    costs: Sequence[dict[int, float]] = [{4: 1, 8: 2}, {2: 1, 6: 3}]
    weighed = partial(least_cost, costs=costs) if policy == "least_cost" else smallest_first
    rig = Rig(SMALL, weighed)
    rig.encode(*(two_path_item(1 + n % 9, n % 8, n) for n in range(60)))
    rig.engine.close()
    assert set(rig.outcomes()) >= {"graph/graph", "graph/skip", "eager/graph", "graph/eager"}


def test_replay_times_of_both_paths_are_weighed() -> None:
    rig = Rig(SMALL)
    rig.encode(two_path_item(1, 1, 0))
    rig.engine.close()
    weighed = choose_packing(PackingOptions(), rig.graphs)
    plans = [two_path_item(2, 0, 0).plan, two_path_item(2, 2, 0).plan]
    assert sorted(i for pack in weighed(plans, SMALL) for i in pack.items) == [0, 1]


def test_exact_layouts_of_each_path() -> None:
    rig = Rig(Capacity(((8,), (6,)), (8, 6), items=5, frames=0, exact_graphs=4))
    for _ in range(3):
        rig.encode(two_path_item(3, 2, 8))
        rig.encode(two_path_item(3, 0, 9))
    rig.engine.close()
    assert rig.outcomes() == {
        **{"eager/eager": 1, "graph/graph": 2},
        **{"eager/skip": 1, "graph/skip": 2},
    }
    assert (rig.misses("local", "first_sight"), rig.hits("local", "exact")) == (1, 2)


def test_without_graphs_both_paths_run_eagerly() -> None:
    rig = Rig(Capacity(((), ()), (8, 6), items=5, frames=0))
    rig.encode(two_path_item(3, 2, 1))
    rig.encode(two_path_item(3, 0, 1))
    rig.engine.close()
    assert rig.outcomes() == {"eager/eager": 1, "eager/skip": 1}
    assert rig.misses("local", "off") == 1
