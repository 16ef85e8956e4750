"""FP8: the numbers, the plan that `calibrate` makes, and what refuses it. On the CPU, emulated."""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch._subclasses import FakeTensorMode

from actors.engine.budgets import Segments
from actors.engine.device import Device
from actors.engine.graphs import GraphSet
from actors.errors import ConfigError
from actors.families.registry import read
from actors.kernels import GATED
from actors.kernels.attention import SegmentAttention
from actors.kernels.gemm import fp8
from actors.kernels.gemm import gemm as gemms
from actors.kernels.gemm.fp8 import Fp8Matrix, Fp8Weight, Matrix, rounded, scales_for
from actors.kernels.gemm.gemm import Gemm
from actors.media.image import decode
from actors.media.patchify import patchifier_of
from actors.models import load as towers
from actors.models.layers.block import (
    ACTIVATIONS,
    NORMS,
    Activation,
    Affine,
    BlockWeights,
    Norm,
    Quantisable,
    ReferenceBlocks,
    Style,
    bounded,
    bounded_block,
    centred_inputs,
    computed_by,
)
from actors.models.layers.patches import Merger
from actors.models.layers.weights import Fp8Layers
from actors.models.load import build, load, tensors
from actors.models.precision import VERSION, LayerPlan, PrecisionPlan, read_plan, rows_digest
from actors.options import GraphOptions, ModelOptions, validated
from actors.startup import open_engine
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Item
from encoder_service import cli
from encoder_service.commands import calibrate
from encoder_service.commands.calibrate import (
    ROWS_COSINE,
    ROWS_ERROR,
    Calibration,
    LayerError,
    relative,
)
from encoder_service.commands.check import missing
from encoder_service.config import fit, parse
from tests.images import jpeg

CPU = torch.device("cpu")
CPU_ONLY = {"device": "cpu", "num_gpus": 0}
ENOUGH = 10
"""Rows for FP8, here."""
TINY = ModelOptions(id="qwen3vl-tiny", load_format="dummy", dtype="float32")
LAYERS: Fp8Layers = {
    "blocks.3.mlp.linear_fc1": torch.linspace(-1, 1, 64).bfloat16(),
    "merger.linear_fc1": torch.linspace(-1, 1, 256).bfloat16(),
}


def picture(side: int) -> Item:
    noise = torch.Generator().manual_seed(side)
    image = torch.randint(256, (3, side, side), dtype=torch.uint8, generator=noise)
    plan, patches = patchifier_of(read(TINY)).patchify(image)
    return Item(plan, patches.numpy())


def item_of(path: Path) -> Item:
    cut, patches = patchifier_of(read(TINY)).patchify(decode(path.read_bytes(), "white"))
    return Item(cut, patches.numpy())


def written(folder: Path, **changes: object) -> GraphOptions:
    """Options with a plan for the tiny model."""
    plan = PrecisionPlan(
        version=VERSION,
        model=TINY.id,
        weights=towers.weights_digest(TINY),
        fp8={name: LayerPlan.of(0.03, mean) for name, mean in LAYERS.items()},
        rows_error=0.04,
        rows_cosine=0.999,
        images=1,
    )
    file = folder / "plan.json"
    file.write_text(json.dumps(plan.model_dump(mode="json") | changes))
    return GraphOptions(precision="fp8", precision_file=str(file))


def test_every_row_has_a_scale_of_its_own() -> None:
    x = torch.randn(50, 256) * torch.logspace(-6, 4, 50)[:, None]
    x[7] = 0
    rows = fp8.quantised(x)
    error = (rows.float() - x).abs() / x.abs().amax(1, keepdim=True).clamp(min=1e-9)
    assert rows.values.dtype == torch.float8_e4m3fn
    assert error.max() <= 2**-4  # half a step of three bits of mantissa
    assert torch.allclose(rows.float().abs().amax(1), x.abs().amax(1), rtol=1e-6)


def test_what_has_no_scale_of_its_own() -> None:
    x = torch.randn(4, 8)
    x[0], x[1, 3], x[2, 3] = 0, torch.inf, torch.nan
    rows = fp8.quantised(x)
    assert torch.equal(rows.float()[0], x[0])
    assert rows.float()[1:3].isnan().all()
    assert torch.equal(rows.float()[3], fp8.quantised(x[3:]).float()[0])


def test_few_rows_stay_in_16_bits() -> None:
    weight = torch.randn(32, 64)
    gemm = Gemm([weight, weight], None, "add", [None, Fp8Weight.of(weight, torch.tensor(8.0))])
    few, many = (gemm.scales(1, rows) for rows in (fp8.FEWEST_ROWS - 1, fp8.FEWEST_ROWS))
    assert few is None
    assert many is not None
    assert many.tolist() == [56.0]
    assert gemm.scales(0, fp8.FEWEST_ROWS) is None


def test_bounds_of_a_norm_and_of_what_follows_it() -> None:
    """Each of their terms by itself. The weight reads two normed parts of four values."""
    gain, shift, none = torch.tensor([3.0, 0, 0, -1]), torch.tensor([0, 5.0, 0, -7]), torch.zeros(4)
    weight = torch.zeros(3, 8)
    weight[0, 0], weight[0, 4], weight[0, 3] = 4.0, -4.0, 12.0
    weight[1, 1], weight[1, 7] = 7.0, 5.0
    assert fp8.largest_normed(gain, none) == 6  # 3 sqrt(4)
    assert fp8.largest_normed(none, shift) == 7
    assert fp8.largest_normed(gain, shift) == 9  # of the last
    bias = torch.tensor([0.0, 0, -2])
    by_gain = fp8.largest_outputs(gain, none, weight, bias) - bias.abs()
    lengths = torch.tensor([(12**2 + 12**2 + 12**2) ** 0.5, 5, 0])  # of the rows times the gains
    assert torch.allclose(by_gain, 1.15 * 8**0.5 * lengths)
    by_shift = fp8.largest_outputs(none, shift, weight, bias)
    # 7 x 5 - 5 x 7 = 0, but both products may be rounded.
    assert torch.allclose(by_shift, torch.tensor([84 + 0.15 * 84, 0.15 * 70, 2]))
    # Also with a bias that takes back what the shift contributes.
    by_shift = fp8.largest_outputs(none, shift, weight, torch.tensor([80.0, 0, 0]))
    assert torch.allclose(by_shift, torch.tensor([4 + 0.15 * 84, 0.15 * 70, 0]))


def test_bounds_of_a_block_follow_its_own_norms() -> None:
    first, second = (Affine(torch.full((4,), gain), torch.zeros(4)) for gain in (1.0, 10.0))
    eye, nothing = torch.eye(4), torch.zeros(4)
    gate, up = torch.tensor([1.0, 2, 3, 4]), torch.tensor([5.0, 6, 7, 8])
    for weight in (torch.diag(gate), torch.cat([torch.diag(gate), torch.diag(up)])):
        linear = Affine(eye, nothing)
        layer = BlockWeights(
            first, linear, linear, second, Affine(weight, torch.zeros(len(weight))), linear
        )
        made = bounded_block(layer)
        bounds = [made.qkv.input_bound, made.up.input_bound, made.down.input_bound]
        outputs = 1.15 * 20 * gate
        # In a gated MLP each neuron has its own.
        expected = outputs * 1.15 * 20 * up if len(weight) == 8 else outputs.max()
        for found, wanted in zip(bounds, [2.0, 20.0, expected], strict=True):
            assert found is not None
            assert torch.allclose(found, torch.as_tensor(wanted))


def test_every_norm_is_centred_and_bounds_are_those_of_what_it_gives() -> None:
    torch.manual_seed(0)
    norms = [Affine(torch.rand(8), torch.randn(8)) for _ in range(3)]
    means = [30 * torch.randn(8), 30 * torch.randn(8), 30 * torch.randn(32)]
    qkv, up, merge = (
        Affine(torch.randn(32, len(mean)), torch.zeros(32), input_mean=mean) for mean in means
    )
    plain = Affine(torch.randn(8, 32), torch.zeros(8))
    layer = bounded_block(BlockWeights(norms[0], qkv, plain, norms[1], up, plain))
    merger = Merger(norms[2], merge, plain)
    for before, norm, made, mean in (
        (norms[0], layer.norm1, layer.qkv, means[0]),
        (norms[1], layer.norm2, layer.up, means[1]),
        (norms[2], merger.norm, merger.linears[0], means[2].view(4, 8).mean(0)),
    ):
        assert torch.allclose(norm.bias, before.bias - mean, atol=1e-5)
        assert made.input_bound == fp8.largest_normed(norm.weight, norm.bias)
    for norm, made, down in (
        (layer.norm2, layer.up, layer.down),
        (merger.norm, *merger.linears),
    ):
        largest = fp8.largest_outputs(norm.weight, norm.bias, made.weight, made.bias)
        assert down.input_bound == largest.amax()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("means", [False, True])
def test_no_input_exceeds_its_bound(activation: Activation, parts: int, *, means: bool) -> None:
    """Not even rows along those of a weight, which give its outputs their largest values."""
    gates = 2 if activation in GATED else 1
    norm = Affine(10 * torch.randn(24), 20 * torch.randn(24))
    up = Affine(torch.randn(40 * gates, 24 * parts), 500 * torch.randn(40 * gates))
    if means:
        norm, up = centred_inputs(norm, replace(up, input_mean=30 * torch.randn(24 * parts)))
    up, down = bounded(norm, up, Affine(torch.randn(8, 40), torch.randn(8)))
    assert up.input_bound is not None
    assert down.input_bound is not None
    along = (up.weight.view(-1, parts, 24) * norm.weight).view(-1, 24)
    rows = torch.cat([along, -along, torch.randn(parts * 40, 24)])
    rows = torch.nn.functional.layer_norm(rows, (24,), norm.weight, norm.bias).view(-1, 24 * parts)
    assert rows.abs().max() <= up.input_bound
    scales = scales_for(up.input_bound)
    made = ACTIVATIONS[activation](up.linear(rounded(rows, scales).values.float() / scales))
    shares = made.abs().amax(0) / down.input_bound
    assert shares.max() <= 1
    assert shares.max() > {"swiglu": 0.05, "geglu_tanh": 0.05, "swiglu_10": 0}.get(activation, 0.4)


@pytest.mark.parametrize("larger", [1, 30, 1000])
def test_a_bound_that_is_too_large_costs_little(larger: float) -> None:
    x = torch.randn(1000, 64)
    for each, most in ((x, 2.7e-2), (x**3, 3e-2 if larger < 1000 else 9e-2)):
        scales = scales_for(larger * each.abs().amax())
        assert relative(rounded(each, scales).values.float() / scales, each) < most


def test_a_large_neuron_of_a_gated_mlp_costs_the_others_nothing() -> None:
    torch.manual_seed(0)
    norm, x = Affine(torch.ones(64), torch.zeros(64)), torch.randn(500, 64)
    weight, out = torch.randn(2, 256, 64), torch.randn(64, 256)
    errors = []
    for times in (1, 50):
        weight[:, 7] *= times
        up = Affine(weight.flatten(0, 1), torch.zeros(512))
        up, down = bounded(norm, up, Affine(out, torch.zeros(64)))
        y = ACTIVATIONS["swiglu"](up.linear(torch.nn.functional.layer_norm(x, (64,))))
        y[:, 7] = 0  # hides the error of the others otherwise
        exact = down.linear(y)
        errors.append(float(((down.in_fp8(y) - exact).norm(dim=1) / exact.norm(dim=1)).median()))
    assert errors[0] < 4e-2
    assert errors[1] < 1.2 * errors[0]


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("parts", [1, 4])
def test_centred_inputs_give_the_same_outputs_with_smaller_errors(kind: Norm, parts: int) -> None:
    torch.manual_seed(0)
    shift = (4 * torch.randn(64)).bfloat16()
    norm, x = Affine(torch.rand(64) + 0.5, shift), torch.randn(400 * parts, 64)
    linear = Affine(torch.randn(80, 64 * parts), torch.randn(80))
    outputs, errors = [], []
    for mean in (None, shift.float().repeat(parts) + torch.randn(64 * parts) / 8):
        before, after = centred_inputs(norm, replace(linear, input_mean=mean))
        assert before.bias.dtype == torch.bfloat16
        before = replace(before, bias=before.bias.float())
        bound = fp8.largest_normed(before.weight, before.bias)
        after = replace(after, input_bound=bound)
        inputs = NORMS[kind](x, before, 1e-6).view(400, -1)
        outputs.append(after.linear(inputs))
        errors.append(relative(after.in_fp8(inputs), outputs[-1]))
    assert torch.allclose(outputs[0], outputs[1], rtol=1e-4, atol=1e-3)
    assert errors[1] < errors[0] / 2
    if parts == 1:
        assert after.input_mean is None
        return
    assert mean is not None
    assert after.input_mean is not None
    # What the common shift does not take away is left for `compensated`.
    left = mean - (shift.float() - before.bias).repeat(parts)
    assert torch.allclose(after.input_mean, left, atol=1e-5)


@pytest.mark.parametrize("columns", [1, 512])
@pytest.mark.parametrize("power", [1, 4])
def test_a_weight_is_rounded_such_that_its_product_with_the_mean_changes_little(
    columns: int, power: int
) -> None:
    torch.manual_seed(0)
    weight, mean = torch.randn(96, 512), torch.randn(512) ** power
    scales = scales_for(torch.rand(columns) + 0.1)
    errors = []
    for given in (None, mean):
        values, factor = fp8.rounded_weight(weight, scales, given)
        made = values.float() * factor * scales
        errors.append((relative(made @ mean, weight @ mean), relative(made, weight)))
    assert errors[1][0] < errors[0][0] / 5
    assert errors[1][1] < 1.05 * errors[0][1]
    unchanged, _ = fp8.rounded_weight(weight, scales, 0 * mean)
    assert torch.equal(unchanged.float(), fp8.rounded_weight(weight, scales)[0].float())


def test_the_emulation_can_be_captured() -> None:
    """As FakeTensorMode shows, it does not wait for the device."""
    with FakeTensorMode():
        x, weight, largest = torch.randn(4, 16), torch.randn(8, 16), torch.tensor(3.0)
        for mean in (None, torch.randn(16)):
            assert fp8.linear(x, weight, torch.zeros(8), largest, mean).shape == (4, 8)


@pytest.mark.skipif(sys.platform != "linux", reason="Triton has wheels for Linux only")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_exact_gelu_stays_exact_where_it_matters(dtype: torch.dtype) -> None:
    from actors.models.layers.fast import Mlp

    linear = Affine(torch.zeros(128, 128, dtype=dtype), torch.zeros(128, dtype=dtype))
    forms = [Mlp([linear], [linear], name, "add").up_gelu for name in ("gelu", "gelu_tanh")]
    assert [form is None for form in forms] == [dtype == torch.float16, False]


@pytest.fixture
def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain torch in place of the kernels of the fast form."""
    if sys.platform != "linux":
        pytest.skip("Triton has wheels for Linux only")
    from actors.models.layers import fast

    def given(x: Tensor, scales: Tensor | None) -> Matrix:
        return x if scales is None else rounded(x, scales)

    def norm(
        x: Tensor, shift: Tensor, weight: Tensor, bias: Tensor, _: float, **kind: Any
    ) -> Matrix:
        normed = torch.nn.functional.layer_norm(x + shift, x.shape[1:], weight, bias, 1e-6)
        return given(normed, kind["scales"])

    def activated(x: Tensor, name: Activation, scales: Tensor | None) -> Matrix:
        return given(ACTIVATIONS[name](x), scales)

    def scaled_mm(x: Fp8Matrix, weight: Fp8Weight, bias: Tensor | None, *_: object) -> Tensor:
        inputs = x.values.float() * weight.factor
        return torch.nn.functional.linear(inputs, weight.values.float(), bias)

    monkeypatch.setattr(gemms, "FEWEST_ROWS", ENOUGH)
    monkeypatch.setattr(gemms, "scaled_mm", scaled_mm)
    monkeypatch.setattr(fast, "norm", norm)
    monkeypatch.setattr(fast, "activated", activated)
    monkeypatch.setattr(fast, "shifted", lambda x, shift, out: out.copy_(x + shift))


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.parametrize("activation", ["gelu_tanh", "swiglu"])
@pytest.mark.parametrize("up_fp8", [False, True])
@pytest.mark.parametrize("down_fp8", [False, True])
def test_each_layer_of_an_mlp_is_in_fp8_or_not(
    activation: Activation, *, up_fp8: bool, down_fp8: bool
) -> None:
    from actors.models.layers.fast import Mlp

    torch.manual_seed(0)
    width = 160 if activation == "swiglu" else 80
    norm = Affine(torch.randn(64), torch.randn(64))
    up = Affine(torch.randn(width, 64), torch.randn(width), fp8=up_fp8)
    up, down = bounded(norm, up, Affine(torch.randn(64, 80), torch.randn(64), fp8=down_fp8))
    rows = torch.nn.functional.layer_norm(torch.randn(12, 64), (64,), norm.weight, norm.bias)
    mlp = Mlp([up], [down], activation, "bias")
    scales = mlp.scales(0, len(rows))
    assert (scales is not None) == up_fp8
    made = mlp(0, rows if scales is None else rounded(rows, scales), len(rows), None)
    # Much closer than the same with another layer in FP8, which is off by 2e-2 or more.
    assert relative(made, down.gemm(ACTIVATIONS[activation](up.gemm(rows)))) < 4e-3


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.parametrize("activation", ["gelu_tanh", "swiglu"])
def test_the_fast_blocks_in_fp8_equal_the_plain_ones(activation: Activation) -> None:
    from actors.models.layers.fast import FastBlocks

    torch.manual_seed(0)
    gates = 2 if activation == "swiglu" else 1

    def linear(rows: int, columns: int, *, in_fp8: bool) -> Affine:
        weight, mean = torch.randn(rows, columns) / columns**0.5, torch.randn(columns) / 3
        return Affine(weight, torch.randn(rows), fp8=in_fp8, input_mean=mean if in_fp8 else None)

    # Every combination of the layers of an MLP; the width of 80 is padded.
    layers = [
        BlockWeights(
            norm1=Affine(torch.randn(64), torch.randn(64)),
            qkv=linear(192, 64, in_fp8=up),
            proj=linear(64, 64, in_fp8=False),
            norm2=Affine(torch.randn(64), torch.randn(64)),
            up=linear(80 * gates, 64, in_fp8=up),
            down=linear(64, 80, in_fp8=down),
        )
        for up in (False, True)
        for down in (False, True)
    ]
    attention, style = SegmentAttention(), Style(4, activation)
    for rows in (9, 12):
        values = {"segment_ends": torch.tensor([rows])}
        x = torch.randn(rows, 64)
        in_fp8 = layers if rows >= ENOUGH else [without_fp8(layer) for layer in layers]
        expected, _ = ReferenceBlocks(in_fp8, style, attention)(x, None, None, values)
        made, _ = FastBlocks(layers, style, attention)(x.clone(), None, None, values)
        plain, _ = ReferenceBlocks([*map(without_fp8, layers)], style, attention)(
            x, None, None, values
        )
        off = relative(expected, plain)
        assert (off > 1e-2) == (rows >= ENOUGH)
        # A value between two of e4m3 may be rounded to the other one.
        assert relative(made, expected) < max(1e-4, off / 3)


def without_fp8(layer: BlockWeights) -> BlockWeights:
    plain = {
        name: replace(getattr(layer, name), fp8=False, input_mean=None)
        for name in ("qkv", "up", "down")
    }
    return replace(layer, **plain)


def test_calibrate_writes_what_the_service_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.effect_noise((64, 96), 90).convert("RGB").save(tmp_path / "one.png")
    out = tmp_path / "plan.json"
    images = [str(tmp_path / "one.png")]
    assert cli.main(["calibrate", "configs/tiny.yaml", *images, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "blocks.3.mlp.linear_fc1" in said
    assert "With fewer than 6 images, others may have larger errors than these" in said
    graphs = GraphOptions(precision="fp8", precision_file=str(out))
    plan = read_plan(graphs, TINY)
    assert plan is not None
    assert f"{len(plan.fp8)} of 18 layers run in FP8" in said
    assert 0 < len(plan.fp8) < 18
    assert plan.rows_error < ROWS_ERROR
    calibration = Calibration(TINY, read(TINY), Device(), [item_of(tmp_path / "one.png")])
    for name, mean in plan.layers.items():
        assert mean is not None
        assert torch.equal(mean, calibration.means[name])


def test_means_are_of_all_images_and_make_layers_more_accurate() -> None:
    items = [picture(64), picture(96)]
    calibration = Calibration(TINY, read(TINY), Device(), items)
    seen: dict[str, list[Tensor]] = defaultdict(list)

    def note(layer: Quantisable, x: Tensor) -> Tensor:
        seen[layer.name].append(x)
        return layer.plain(x)

    spec, weights = read(TINY), tensors(TINY, read(TINY), CPU)
    uncentred = build(spec, weights, CPU, ReferenceBlocks)
    with computed_by(note):
        expected = calibration.encode(uncentred)
    for name, inputs in seen.items():
        mean = (inputs[0].mean(0) + inputs[1].mean(0)) / 2
        assert torch.allclose(mean, calibration.means[name].float(), atol=1e-2)
    with computed_by(lambda layer, x: layer.plain(x)):
        for rows, exact in zip(calibration.encode(calibration.plain), expected, strict=True):
            assert relative(rows, exact) < 1e-5
    after = calibration.deviation(calibration.means).error
    calibration.plain = uncentred
    assert after < 0.92 * calibration.deviation(calibration.means).error


def test_a_replica_computes_what_the_plan_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Device, "measuring_seconds", 1e-3)
    item, plain = picture(96), parse({"model": TINY.model_dump(), "encoder": CPU_ONLY})
    rows = {}
    for name, graphs in {"bf16": plain.graphs, "fp8": written(tmp_path)}.items():
        engine = open_engine(plain.model_copy(update={"graphs": graphs}), EncoderMetrics())
        rows[name] = engine.submit(replace(item)).result().rows
        engine.close()
    spec = read(TINY)
    tower = build(spec, tensors(TINY, spec, CPU), CPU, fp8=LAYERS)
    expected = GraphSet(tower, "default", (), Segments(0), Device()).run(None, [item])
    assert relative(rows["fp8"], expected) < 1e-5
    assert 1e-3 < relative(rows["fp8"], rows["bf16"]) < ROWS_ERROR


class Outliers(Mapping[str, Tensor]):
    """Norms have 20 channels that are 50 times as large as the others, as in trained towers, and
    the layers behind them take that back. Two more are equal, and large before the MLP of block 2,
    where what one adds the other takes away."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = weights

    def __getitem__(self, name: str) -> Tensor:
        found, large = self.weights[name], torch.arange(0, 60, 3)
        if name.startswith("blocks") and name.endswith(("norm1.weight", "norm2.weight")):
            found[large] *= 50
        elif name.startswith("blocks") and name.endswith(("qkv.weight", "linear_fc1.weight")):
            found[:, large] /= 50
        if name == "pos_embed.weight":
            found[:, 2] = found[:, 1]
        elif ".proj." in name or ".linear_fc2." in name:
            found[2] = found[1]
        elif name == "blocks.2.norm2.weight":
            found[1], found[2] = 60, 47
        elif name == "blocks.2.norm2.bias":
            found[1:3] = 0
        elif name == "blocks.2.mlp.linear_fc1.weight":
            found[:, 2] = found[:, 1] * -60 / 47
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


SENSITIVE = "blocks.2.mlp.linear_fc1"


@pytest.fixture(scope="module")
def calibration() -> Iterator[Calibration]:
    spec = read(TINY)
    whole = tensors(TINY, spec, CPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate, "tensors", lambda *_: Outliers(whole))
        yield Calibration(TINY, spec, Device(), [picture(64)])


def test_layers_that_outliers_spoil_stay_as_they_are(calibration: Calibration) -> None:
    errors = {name: each.relative for name, each in calibration.errors.items()}
    assert errors.pop(SENSITIVE) > 0.1
    assert max(errors.values()) < 6e-2  # however large the channels: e4m3 has exponents
    plan = calibration.plan(6e-2)
    assert plan.fp8
    assert SENSITIVE not in plan.fp8
    assert not calibration.deviation(errors).fits  # so the limits for the rows matter, too
    assert calibration.deviation(plan.fp8).fits
    assert plan.rows_error < ROWS_ERROR
    assert plan.rows_cosine > ROWS_COSINE


def test_a_layer_whose_outputs_are_all_zero_stays_as_it_is() -> None:
    assert LayerError(operations=1).relative == math.inf


def test_a_bound_that_no_layer_keeps(calibration: Calibration) -> None:
    with pytest.raises(ConfigError, match="no layer can run in FP8"):
        calibration.plan(1e-4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"precision": "fp8"}, "precision_file to what `encoder-service calibrate` wrote"),
        ({"precision_file": "plan.json"}, "only with precision: fp8"),
        (
            {"precision": "fp8", "precision_file": "plan.json", "blocks": "compile"},
            "blocks: compile does not have",
        ),
        ({"precision": "int8"}, "precision"),
    ],
)
def test_options_that_do_not_go_together(given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validated(GraphOptions, given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": "of another"}, "for other weights, those of qwen3vl-tiny"),
        ({"layers": []}, "layers: no such key"),
        ({"fp8": {"merger.linear_fc1": {"error": 0.1, "means": ""}}}, r"Did you mean mean\?"),
        ({"fp8": {"merger.linear_fc1": {"error": 0.1, "mean": "AAAA"}}}, "not a whole number"),
        (
            {"version": 2, "fp8": ["merger.linear_fc1"], "errors": {"merger.linear_fc1": 0.1}},
            r"plan\.json was written by another version of `encoder-service calibrate`",
        ),
    ],
)
def test_a_plan_of_something_else(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_plan(written(tmp_path, **changes), TINY)


@pytest.mark.parametrize("mean", ["", "!!!!!!!!", "AAA=", torch.full((256,), math.nan)])
def test_a_mean_that_does_not_fit_is_refused_by_check_and_at_start(
    mean: str | Tensor, tmp_path: Path
) -> None:
    layer = {"error": 0.1, "mean": mean}
    if isinstance(mean, Tensor):
        layer = LayerPlan.of(0.1, mean.bfloat16()).model_dump(mode="json")
    graphs = written(tmp_path, fp8={"merger.linear_fc1": layer})
    service = parse(
        {"model": TINY.model_dump(), "encoder": CPU_ONLY, "graphs": graphs.model_dump()}
    )
    for read_it in (lambda: list(missing(service)), lambda: open_engine(service, EncoderMetrics())):
        with pytest.raises(ConfigError, match=r"the mean of merger\.linear_fc1 does not fit"):
            read_it()


def test_calibrate_says_what_is_wrong_before_it_measures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "Calibration", None)
    (tmp_path / "text.jpg").write_text("no picture")
    (tmp_path / "cat.jpg").write_bytes(jpeg(64, 64))
    for image, out, message in (
        ("text.jpg", "plan.json", "text.jpg: the file is not an image"),
        ("cat.jpg", "missing/plan.json", "No such file or directory"),
    ):
        given = ["configs/tiny.yaml", str(tmp_path / image), "--out", str(tmp_path / out)]
        assert cli.main(["calibrate", *given]) == 1
        assert message in capsys.readouterr().err


def test_check_warns_of_a_plan_elsewhere_and_refuses_one_that_cannot_be_read(
    tmp_path: Path,
) -> None:
    path = tmp_path / "plan.json"
    graphs = GraphOptions(precision="fp8", precision_file=str(path))
    service = parse(
        {"model": TINY.model_dump(), "encoder": CPU_ONLY, "graphs": graphs.model_dump()}
    )
    (warning,) = missing(service)
    assert warning == (
        f"graphs.precision_file {path} is not on this machine; every encoder node needs it"
    )
    path.mkdir()
    with pytest.raises(ConfigError, match=r"graphs\.precision_file cannot be read: .*directory"):
        list(missing(service))
    path.rmdir()
    for content in ("no JSON", "{}"):
        path.write_text(content)
        with pytest.raises(ConfigError, match=r"graphs\.precision_file cannot be read: "):
            list(missing(service))
    written(tmp_path, version=1)
    with pytest.raises(ConfigError, match="written by another version"):
        list(missing(service))
    written(tmp_path)
    assert not list(missing(service))


def test_a_plan_that_is_not_there(tmp_path: Path) -> None:
    graphs = GraphOptions(precision="fp8", precision_file=str(tmp_path / "none.json"))
    with pytest.raises(ConfigError, match="precision_file cannot be read"):
        read_plan(graphs, TINY)


def test_a_layer_that_the_model_does_not_have() -> None:
    with pytest.raises(ConfigError, match=r"the model has no blocks\.99\.attn\.qkv"):
        load(TINY, CPU, fp8={"blocks.99.attn.qkv": None})


def test_families_without_fp8_are_refused() -> None:
    for name in ("siglip-so400m", "gemma4-31b", "deepseek-ocr", "internvl3-8b"):
        options = parse(
            {
                "model": {"id": name, "load_format": "dummy"},
                "graphs": {"precision": "fp8", "precision_file": "plan.json"},
            }
        )
        with pytest.raises(ConfigError, match=r"which the family .+ does not have"):
            fit(options, read(options.model))


@pytest.mark.parametrize(("capability", "has"), [((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_gpus_without_fp8_are_refused(
    capability: tuple[int, int], has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    if has:
        towers.check_fp8(read(TINY), torch.device("cuda"))
        return
    with pytest.raises(ConfigError, match=r"compute capability 8\.9; this one has 8\.6"):
        towers.check_fp8(read(TINY), torch.device("cuda"))


def test_rows_of_other_plans_are_other_rows(tmp_path: Path) -> None:
    plain = rows_digest(GraphOptions(), TINY)
    one = rows_digest(written(tmp_path), TINY)
    written(tmp_path)
    layers = json.loads((tmp_path / "plan.json").read_text())["fp8"]
    name, layer = layers.popitem()
    fewer = rows_digest(written(tmp_path, fp8=layers), TINY)
    centred = rows_digest(written(tmp_path, fp8=layers | {name: layer | {"mean": "AAA="}}), TINY)
    again = rows_digest(written(tmp_path, fp8={name: layer} | layers, images=7), TINY)
    assert len({plain, one, fewer, centred}) == 4
    assert again == one
