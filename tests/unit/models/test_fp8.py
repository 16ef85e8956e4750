"""FP8: the numbers, and the layers and blocks that compute with them. On the CPU, emulated."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from actors.kernels import GATED
from actors.kernels.attention import SegmentAttention
from actors.kernels.gemm import fp8
from actors.kernels.gemm import gemm as gemms
from actors.kernels.gemm.fp8 import Fp8Matrix, Fp8Weight, Matrix, rounded, scales_for
from actors.kernels.gemm.gemm import Gemm
from actors.models.layers.block import (
    ACTIVATIONS,
    NORMS,
    Activation,
    Affine,
    BlockWeights,
    Norm,
    ReferenceBlocks,
    Style,
    bounded,
    bounded_block,
    centred_inputs,
)
from actors.models.layers.patches import Merger
from encoder_service.commands.calibrate import relative

ENOUGH = 10
"""Rows for FP8, here."""


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
