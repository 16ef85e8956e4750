"""Attention in FP8: the numbers, the slots, the plan, and who has it. On the CPU, emulated."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

from actors.engine.device import Device
from actors.errors import ConfigError
from actors.families.registry import read
from actors.kernels import attention_fp8
from actors.kernels.attention import SegmentAttention, TritonAttention, choose
from actors.kernels.attention_fp8 import FEWEST_KEYS
from actors.kernels.hopper import attention as hopper
from actors.kernels.hopper import attention_fp8 as long_attention
from actors.kernels.hopper import cuda
from actors.kernels.hopper.attention import HopperAttention
from actors.kernels.hopper.attention_fp8 import ALIGNED, HopperLongAttention
from actors.kernels.hopper.cuda import CAPABILITY, LoadedKernel
from actors.media.patchify import patchifier_of
from actors.models.layers.block import ATTENTION
from actors.models.layers.weights import APPENDED
from actors.models.load import build, load, tensors
from actors.options import ModelOptions
from actors.types import Item
from encoder_service.commands import calibrate
from encoder_service.commands.calibrate import ROWS_ERROR, Calibration, relative
from tests.small_presets import write_small

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
TINY = ModelOptions(id="qwen3vl-tiny", load_format="dummy", dtype="float32")
HEAD_SIZE = 16
"""Of the tiny model."""


@pytest.fixture
def long_from_64(monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (HEAD_SIZE, 72):
        monkeypatch.setitem(FEWEST_KEYS, size, 64)


def attend(qkv: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """In FP8, and exact."""
    attention = SegmentAttention()
    values = attention.metadata(lengths, len(qkv), len(lengths))
    return attention.fp8(qkv, values, None, None), attention(qkv, values)


def untouched(_: Tensor) -> None:
    pass


def outliers(qkv: Tensor) -> None:
    """Keys and values, in two channels."""
    qkv[:, 1:, :, [3, 40]] *= 16


def values_with_a_mean(qkv: Tensor) -> None:
    qkv[:, 2] += 1


def scores_in_the_hundreds(qkv: Tensor) -> None:
    qkv[:, 0, :, 0] = 60
    qkv[:, 1, :, 0] = -80


@pytest.mark.usefixtures("long_from_64")
@pytest.mark.parametrize(
    ("change", "least", "most"),
    [
        (untouched, 4e-2, 6e-2),
        (values_with_a_mean, 1e-3, 1e-2),
        (outliers, 1e-1, 4e-1),
        (scores_in_the_hundreds, 4e-2, 6e-2),
    ],
)
def test_how_far_off_it_is(change: Callable[[Tensor], None], least: float, most: float) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(700, 3, 2, 72)
    change(qkv)
    made, exact = attend(qkv, [700])
    assert least < relative(made, exact) < most


@pytest.mark.usefixtures("long_from_64")
def test_short_segments_and_other_heads_are_as_before() -> None:
    torch.manual_seed(0)
    made, exact = attend(torch.randn(200, 3, 2, 72), [63, 64, 73])
    assert torch.equal(made[:63], exact[:63])
    assert not torch.equal(made[63:127], exact[63:127])
    made, exact = attend(torch.randn(200, 3, 2, 88), [200])
    assert torch.equal(made, exact)


@pytest.mark.parametrize("fewest", [1, 64])
@pytest.mark.parametrize(
    "lengths", [[64], [63, 64, 65], [1, 300, 2, 513, 64], [3] * 30 + [100], [16, 80, 160]]
)
def test_long_segments_lie_where_tma_can_read_them(lengths: list[int], fewest: int) -> None:
    """It reads values from multiples of 16 only; elsewhere it is an illegal instruction."""
    attention, patches = HopperLongAttention([], LoadedKernel(None, 0, 0), 72), sum(lengths) + 7
    attention.fewest = fewest
    shapes = attention.inputs(patches)
    tables = attention.metadata(lengths, patches)
    assert {name: (tuple(table.shape), table.dtype) for name, table in tables.items()} == shapes
    slots, table = tables["attention_slots"].tolist(), tables["attention_long_items"].tolist()
    assert len(slots) % ALIGNED == 0
    found = set()
    for start, end, _, _ in table[1 : 1 + table[0][0]]:
        assert start % ALIGNED == 0
        assert slots[start:end] == list(range(slots[start], slots[start] + end - start))
        found.add((slots[start], end - start))
    ends = [sum(lengths[: index + 1]) for index in range(len(lengths))]
    segments = [(end - length, length) for end, length in zip(ends, lengths, strict=True)]
    assert found == {each for each in segments if each[1] >= fewest}
    short = [start + i for start, length in segments if length < fewest for i in range(length)]
    assert [-2 - slot for slot in slots if slot < -1] == short


def test_many_short_segments_take_no_time_each() -> None:
    """As the windows of Qwen2.5-VL, whose tables every pack has."""
    attention, lengths = HopperLongAttention([], LoadedKernel(None, 0, 0), 80), [64] * 1000
    times = []
    for _ in range(5):
        started = time.process_time()
        attention.metadata(lengths, sum(lengths))
        times.append(time.process_time() - started)
    assert min(times) < 3e-3


def test_short_budgets_have_no_inputs_for_it() -> None:
    attention = HopperLongAttention([], LoadedKernel(None, 0, 0), 72)
    assert not attention.inputs(FEWEST_KEYS[72] - 1)
    assert attention.inputs(FEWEST_KEYS[72])


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[tuple[int, int]], None]]:
    """Makes torch report a GPU of a compute capability."""
    caches = hopper.kernels_for, cuda.runs_on, long_attention.long_kernels

    def is_there(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(torch.cuda, "device", nullcontext)

    for cached in caches:
        cached.cache_clear()
    yield is_there
    for cached in caches:
        cached.cache_clear()


class OnGpu:
    """As much of a tensor as is asked."""

    is_cuda, device, shape = True, CUDA, (9000, 3, 16, 72)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_other_chips_stay_in_16_bits(
    capability: tuple[int, int],
    chip: Callable[[tuple[int, int]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chip(capability)
    chosen = choose(CUDA, torch.bfloat16, 72, captured=True, fp8=True)
    assert isinstance(chosen, TritonAttention)
    assert not attention_fp8.has(OnGpu())  # type: ignore[arg-type]
    monkeypatch.setattr(TritonAttention, "__call__", lambda *_: "in 16 bits")
    assert chosen.fp8(torch.empty(0), {}, None, None) == "in 16 bits"


def test_a_kernel_that_cannot_be_built_is_16_bits_and_one_warning(
    chip: Callable[[tuple[int, int]], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def compiled(source: str) -> bytes:
        if "e4m3" in source:
            raise RuntimeError("error: e4m3")
        return b""

    chip(CAPABILITY)
    monkeypatch.setattr(cuda, "compiled", compiled)
    monkeypatch.setattr(cuda, "load", lambda *_: LoadedKernel(None, 0, 0))
    assert attention_fp8.has(OnGpu())  # type: ignore[arg-type]
    chosen = [choose(CUDA, torch.bfloat16, 72, captured=True, fp8=True) for _ in range(2)]
    assert all(isinstance(each, HopperAttention) and each.long is None for each in chosen)
    assert list(chosen[0].inputs(9000, 4)) == ["attention_items"]
    (line,) = caplog.messages
    assert "error: e4m3" in line


SENSITIVE = "blocks.2.attn.qkv"


class Outliers(Mapping[str, Tensor]):
    """Queries and keys of block 2 are so large that most weights are 0 or 1."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = weights

    def __getitem__(self, name: str) -> Tensor:
        found = self.weights[name]
        if name == f"{SENSITIVE}.weight":
            found[:128] *= 30
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


def picture(options: ModelOptions = TINY) -> Item:
    noise = torch.Generator().manual_seed(1)
    image = torch.randint(256, (3, 160, 160), dtype=torch.uint8, generator=noise)
    plan, patches = patchifier_of(read(options)).patchify(image)
    return Item(plan, patches.numpy())


@pytest.mark.usefixtures("long_from_64")
def test_calibrate_leaves_out_attention_that_is_too_far_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = tensors(TINY, read(TINY), CPU)
    monkeypatch.setattr(calibrate, "tensors", lambda *_: Outliers(whole))
    calibration = Calibration(TINY, read(TINY), Device(), [picture()])
    errors = {name: each.relative for name, each in calibration.errors.items() if ATTENTION in name}
    assert len(errors) == 4
    assert errors.pop(f"{SENSITIVE}{ATTENTION}") > 6e-2
    assert max(errors.values()) < 6e-2
    plan = calibration.plan(6e-2)
    assert set(errors) & set(plan.fp8)
    assert f"{SENSITIVE}{ATTENTION}" not in plan.fp8
    assert plan.rows_error < ROWS_ERROR


def test_images_without_long_segments_say_nothing_about_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(FEWEST_KEYS, HEAD_SIZE, picture().plan.patches + 1)
    calibration = Calibration(TINY, read(TINY), Device(), [picture()])
    assert not [name for name in calibration.errors if name.endswith(ATTENTION)]


@pytest.mark.usefixtures("long_from_64")
def test_a_tower_attends_as_the_plan_says() -> None:
    spec, item = read(TINY), picture()
    layers = {f"blocks.{index}.attn.qkv{ATTENTION}": None for index in (1, 3)}
    calibration = Calibration(TINY, spec, Device(), [item])
    tower = build(spec, tensors(TINY, spec, CPU), CPU, fp8=layers)
    (made,), (exact,) = calibration.encode(tower), calibration.expected
    assert 1e-4 < relative(made, exact) < ROWS_ERROR
    (expected,) = calibration.rows(layers)
    assert relative(made, expected) < 1e-4


def test_attention_that_hides_rows_is_not_measured_and_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FEWEST_KEYS, HEAD_SIZE + APPENDED, 1)
    write_small(tmp_path, "phi4-multimodal")
    options = ModelOptions(id=str(tmp_path), load_format="dummy", dtype="float32")
    spec, item = read(options), picture(options)
    calibration = Calibration(options, spec, Device(), [item])
    assert not [name for name in calibration.errors if name.endswith(ATTENTION)]
    layers = {f"encoder.layers.0.self_attn.q_proj{ATTENTION}": None}
    tower = build(spec, tensors(options, spec, CPU), CPU, fp8=layers)
    assert torch.equal(calibration.encode(tower)[0], calibration.expected[0])


def test_attention_that_the_model_does_not_have() -> None:
    with pytest.raises(ConfigError, match=r"the model has no blocks\.99\.attn\.qkv attention"):
        load(TINY, CPU, fp8={f"blocks.99.attn.qkv{ATTENTION}": None})
