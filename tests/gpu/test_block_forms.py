"""On a GPU: Qwen3-VL with few layers and its blocks in each form, captured, against float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from actors.engine.budgets import Segments
from actors.engine.device import Device
from actors.engine.graphs import GraphSet
from actors.kernels.gemm.fp8 import FEWEST_ROWS
from actors.models.layers.block import blocks_of
from actors.models.layers.weights import Fp8Layers
from actors.models.load import build, form_of_blocks, tensors
from actors.models.packed import PackedTower
from actors.options import BlockChoice, BlockForm, ModelOptions
from actors.spec.model_spec import ModelSpec
from actors.types import Item, ModelDtype
from tests.gpu.test_graphs import items_within
from tests.gpu.test_tiled_graphs import poison
from tests.gpu.towers import cuda, finished, published, relative_error, shallow

pytestmark = pytest.mark.gpu

BUDGETS = (64, 104, 256, 1000)
LAYERS = {"depth": 4, "deepstack_visual_indexes": [0, 1, 2]}


@pytest.fixture(scope="module")
def device() -> Device:
    return cuda()


@pytest.fixture(scope="module")
def model() -> ModelSpec:
    whole = published("qwen3vl-2b")
    return replace(whole, vision={**whole.vision, **LAYERS})


@pytest.fixture(scope="module")
def weights(model: ModelSpec, device: Device) -> Mapping[str, Tensor]:
    return tensors(ModelOptions(id=model.id, load_format="dummy"), model, device.device)


@pytest.fixture(autouse=True)
def _forget_compilations() -> Iterator[None]:
    """Those of other towers in this process count against torch.compile's limit."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


MLPS = {"qwen3vl-2b": ("linear_fc1", "linear_fc2"), "qwen25vl-7b": ("gate_proj", "down_proj")}
"""The second is gated."""
MERGERS = {
    "qwen3vl-2b": {
        "merger.linear_fc1",
        "merger.linear_fc2",
        "deepstack_merger_list.0.linear_fc1",
    },
    "qwen25vl-7b": {"merger.mlp.0", "merger.mlp.2"},
}


def some_blocks(preset: str) -> set[str]:
    up, down = (f"mlp.{name}" for name in MLPS[preset])
    whole = {f"blocks.{block}.{name}" for block in (0, 2) for name in ("attn.qkv", up, down)}
    return whole | {f"blocks.1.{up}", f"blocks.3.{down}"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler, which is reset
@pytest.mark.parametrize(
    ("preset", "dtype", "fp8"),
    [
        # With both, the roundings of bfloat16 alone come near the limit.
        *((preset, "float16", some_blocks(preset) | MERGERS[preset]) for preset in MLPS),
        *((preset, "bfloat16", some_blocks(preset)) for preset in MLPS),
        ("qwen25vl-7b", "bfloat16", MERGERS["qwen25vl-7b"]),
    ],
)
def test_fp8_is_captured_and_equals_its_emulation(
    preset: str, dtype: ModelDtype, fp8: set[str], device: Device
) -> None:
    model = replace(shallow(preset), dtype=dtype)
    weights = tensors(ModelOptions(id=model.id, load_format="dummy"), model, device.device)
    # Any mean is compensated, up to the rounding of biases; the true ones make FP8 more accurate.
    means: Fp8Layers = {
        name: torch.randn(weights[f"{name}.weight"].shape[1]) / 3 for name in sorted(fp8)
    }
    tower = build(model, weights, device.device, fp8=means)
    emulated = build(replace(model, dtype="float32"), weights, device.device, fp8=means)
    plain = build(replace(model, dtype="float32"), weights, device.device)
    graphs = GraphSet(tower, "default", BUDGETS, Segments(8), device)
    graphs.capture(lambda budget, seconds: None)
    exact, without = (
        GraphSet(each, "default", (), Segments(0), device) for each in (emulated, plain)
    )

    def check(rows: Tensor, items: list[Item], patches: int) -> None:
        expected, before = (finished(each.run(None, items)) for each in (exact, without))
        if patches < FEWEST_ROWS:
            assert relative_error(rows, before) < 2e-2, patches
            return
        off = relative_error(expected, before)
        assert 1e-2 < off < 1e-1, patches
        # Values that are rounded to the other side change it by a part of its own error.
        assert relative_error(rows, expected) < 0.9 * off, patches
        # Without FP8 the rows would change in other directions.
        change, wanted = rows.float() - before, expected - before
        assert 0.4 < float((change * wanted).sum() / wanted.square().sum()) < 1.4, patches

    for budget in (*BUDGETS, *reversed(BUDGETS)):
        poison(graphs)
        items = items_within(budget, 5, budget, 3 * model.sizing.patch_size**2)
        check(finished(graphs.run(budget, items)), items, 4 * budget)
        check(finished(graphs.run(None, items)), items, sum(each.plan.patches for each in items))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler, by itself
@pytest.mark.parametrize(
    ("asked", "form"),
    [("auto", "fast"), ("fast", "fast"), ("compile", "compile"), ("reference", "reference")],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_each_form_is_captured_and_equals_the_reference(
    asked: BlockChoice,
    form: BlockForm,
    dtype: str,
    model: ModelSpec,
    weights: Mapping[str, Tensor],
    device: Device,
) -> None:
    model = replace(model, dtype=dtype)  # type: ignore[arg-type]
    tower = build(model, weights, device.device, form_of_blocks(model, device.device, asked))
    assert isinstance(tower, PackedTower)
    assert type(tower.blocks) is blocks_of(form)
    reference = build(replace(model, dtype="float32"), weights, device.device)
    graphs = GraphSet(tower, "default", BUDGETS, Segments(8), device)
    graphs.capture(lambda budget, seconds: None)
    exact = GraphSet(reference, "default", (), Segments(0), device)
    for budget in (*BUDGETS, *reversed(BUDGETS)):  # graphs replay in any order
        poison(graphs)
        items = items_within(budget, 5, seed=budget)
        rows = finished(graphs.run(budget, items))
        assert relative_error(rows, finished(exact.run(None, items))) < 2e-2, budget
    eager = finished(graphs.run(None, items))
    assert relative_error(eager, finished(exact.run(None, items))) < 2e-2
