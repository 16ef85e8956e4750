"""Which attention a device, dtype and head size get, and what cannot be captured. Needs no GPU."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from actors.errors import ConfigError, StartError
from actors.kernels.attention import HEAD_SIZES, SegmentAttention, TritonAttention, choose
from actors.kernels.break_points import at_break_points
from actors.kernels.gemm.cublaslt import GemmShape
from actors.kernels.gemm.skinny_gemm import skinny_gemms
from actors.kernels.hopper import cuda
from actors.kernels.hopper.attention import HopperAttention, kernels_for, launches
from actors.kernels.hopper.cuda import CAPABILITY
from actors.models.load import load
from actors.options import ModelOptions
from encoder_service.config import parse

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_are_captured(dtype: torch.dtype, head_size: int) -> None:
    chosen = choose(CUDA, dtype, head_size, captured=True)
    assert isinstance(chosen, TritonAttention | HopperAttention)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (10, 0), (12, 0)])
def test_other_chips_than_hopper_get_triton_and_cublaslt_and_say_so_once(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    kernels_for.cache_clear()
    cuda.runs_on.cache_clear()
    with caplog.at_level("INFO"):
        chosen = [choose(CUDA, torch.bfloat16, size, captured=True) for size in (64, 72)]
        gemms = skinny_gemms(GemmShape(416, 1152, 1152, 1152, 1152, torch.bfloat16), "add", CUDA)
    kernels_for.cache_clear()
    cuda.runs_on.cache_clear()
    assert all(isinstance(each, TritonAttention) for each in chosen)
    assert not gemms
    (line,) = caplog.messages
    assert "{}.{}".format(*capability) in line


@pytest.mark.parametrize(
    "error",
    [ImportError("No module named 'cuda'"), OSError("libcuda"), RuntimeError("error: wgmma")],
)
def test_a_hopper_kernel_that_cannot_be_built_is_triton_and_one_warning(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> bytes:
        raise error

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: CAPABILITY)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(cuda, "compiled", fails)
    kernels_for.cache_clear()
    chosen = [choose(CUDA, torch.bfloat16, 72, captured=True) for _ in range(2)]
    kernels_for.cache_clear()
    assert all(isinstance(each, TritonAttention) for each in chosen)
    (line,) = caplog.messages
    assert str(error) in line


def test_float32_on_cuda_is_the_reference_and_not_captured() -> None:
    assert isinstance(choose(CUDA, torch.float32, 64), SegmentAttention)
    with pytest.raises(StartError, match=r"model\.dtype is float32.*graphs\.mode to off"):
        choose(CUDA, torch.float32, 64, captured=True)


def test_other_heads_on_cuda_are_the_reference_and_not_captured() -> None:
    assert isinstance(choose(CUDA, torch.bfloat16, 48), SegmentAttention)
    with pytest.raises(StartError, match=r"48 values.* 64, 72, .*graphs\.mode to off"):
        choose(CUDA, torch.bfloat16, 48, captured=True)


def test_the_cpu_captures_what_it_likes() -> None:
    assert isinstance(choose(CPU, torch.float32, 48, captured=True), SegmentAttention)


def test_it_is_said_before_weights_are_read() -> None:
    model = ModelOptions(id="qwen3vl-8b", load_format="dummy", dtype="float32")
    with pytest.raises(StartError, match=r"graphs\.mode to off"):
        load(model, CUDA, captured=True)


def test_check_says_it_too() -> None:
    args = {"model": {"id": "qwen3vl-tiny", "load_format": "dummy", "dtype": "float32"}}
    with pytest.raises(ConfigError, match=r"model\.dtype is float32"):
        parse(args)
    assert parse(args | {"graphs": {"mode": "off"}}).model.dtype == "float32"
    assert parse(args | {"encoder": {"device": "cpu", "num_gpus": 0}}).graphs.mode == "budget"


@pytest.mark.parametrize(("patches", "count"), [(400, 1), (16384, 1), (20000, 2), (32768, 4)])
def test_long_attention_has_several_launches_with_break_points_around_each(
    patches: int, count: int
) -> None:
    qkv = torch.empty(patches, 3, 16, 72, device="meta")
    assert list(launches(qkv)) == [(0, 1)]
    seen: list[tuple[int, int] | None] = []
    with at_break_points(lambda: seen.append(None)):
        seen.extend(launches(qkv))
    if count > 1:
        assert seen[::2] == [None] * (count + 1)
        seen = seen[1::2]
    assert seen == [(index, count) for index in range(count)]
