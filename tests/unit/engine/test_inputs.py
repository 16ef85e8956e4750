"""What graphs read: metadata as one piece, at each graph's own offsets, and rows in one copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from actors.engine.budgets import Segments
from actors.engine.device import ALIGNED_BYTES, Device, Places
from actors.engine.graphs import CACHED_LAYOUTS, GraphSet
from actors.kernels.attention import Shapes
from actors.models.load import load
from actors.options import ModelOptions
from actors.types import Item
from tests.toy_tower import ToyTower, toy_item, toy_rows

DTYPES = (torch.uint8, torch.int32, torch.float32, torch.bfloat16)

all_shapes = st.dictionaries(
    st.sampled_from(["places", "taps", "tap_weights", "rows", "patches"]),
    st.tuples(st.tuples(st.integers(1, 300), st.integers(1, 4)), st.sampled_from(DTYPES)),
    min_size=1,
)


@given(all_shapes)
def test_inputs_lie_aligned_and_apart(shapes: Shapes) -> None:
    places = Places(shapes)
    buffer = torch.zeros(places.size_bytes + 100, dtype=torch.uint8)
    views = places.views(buffer)
    assert views.keys() == shapes.keys() - {"patches"}
    for name, view in views.items():
        assert (tuple(view.shape), view.dtype) == shapes[name]
        assert (view.data_ptr() - buffer.data_ptr()) % ALIGNED_BYTES == 0
        view.view(torch.uint8).add_(1)
    assert int(buffer.sum()) == sum(view.nbytes for view in views.values())


def graph_set(*budgets: int) -> GraphSet:
    graphs = GraphSet(ToyTower(), "default", budgets, Segments(32), Device())
    graphs.capture(lambda budget, seconds: None)
    return graphs


def test_nothing_is_left_of_another_budget() -> None:
    tower = load(ModelOptions(id="qwen3vl-tiny", load_format="dummy"), torch.device("cpu"))
    graphs = GraphSet(tower, "default", (64, 1024), Segments(8), Device())
    graphs.inputs.metadata.fill_(255)
    plan = toy_item(9, 1).plan
    graphs.inputs.stage(graphs.packed(64, (plan,)), {})
    values = tower.metadata("default", [plan], 64, 8)
    static = graphs.static(graphs.budget_shapes(64, videos=False))
    assert values.keys() == static.keys() - {"patches"}
    for name, value in values.items():
        assert torch.equal(static[name][: len(value)], value)
        assert not static[name][len(value) :].any()


def test_metadata_of_another_type_or_size_is_a_bug() -> None:
    places = Places({"ends": ((3,), torch.int32), "last": ((300,), torch.int32)})
    last = torch.ones(300, dtype=torch.int32)
    for ends in (torch.ones(3, dtype=torch.int64), torch.ones(4, dtype=torch.int32)):
        with pytest.raises(AssertionError, match=r"ends .*This is a bug"):
            places.packed({"ends": ends, "last": last}, Device().host_buffer(places.size_bytes))


class Operations(TorchDispatchMode):
    """Those of torch that were called, views left out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_twenty_items_are_staged_in_two_copies() -> None:
    graphs = graph_set(256)
    items = [toy_item(10, seed) for seed in range(20)]
    plans = tuple(item.plan for item in items)
    patches = [torch.from_numpy(item.patches) for item in items]
    metadata = graphs.packed(256, plans)
    with Operations() as operations:
        graphs.inputs.stage(metadata, graphs.rows(plans, patches, ()))
    assert sorted(operations.names) == ["aten::cat.out", "aten::copy_"]
    assert torch.equal(graphs.inputs.tensors["patches"][:800], torch.cat(patches))


def expected(items: list[Item]) -> Tensor:
    return torch.cat([toy_rows(item) for item in items])


def test_metadata_of_a_layout_is_made_once_and_bounded() -> None:
    graphs = graph_set(64, 128)
    for seed in range(3):
        for tokens in ((5, 9), (9, 5), (60, 20)):
            items = [toy_item(n, seed) for n in tokens]
            assert torch.equal(graphs.run(128 if sum(tokens) > 64 else 64, items), expected(items))
    again = tuple(toy_item(n, 0).plan for n in (5, 9))
    kept = graphs.packed(64, again)
    assert graphs.packed(64, again) is kept
    assert graphs.packed(128, again) is not kept
    for n in range(1, CACHED_LAYOUTS):
        graphs.packed(128, (toy_item(n, 0).plan,))
        graphs.packed(64, again)
    assert graphs.packed(64, again) is kept
    for n in range(1, CACHED_LAYOUTS + 1):
        graphs.packed(64, (toy_item(n, 0).plan,))
    assert graphs.packed(64, again) is not kept
