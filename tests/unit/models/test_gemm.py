"""How often a GEMM is launched to be timed, and when torch's is taken instead."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_void_p

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from actors.kernels.gemm import gemm as gemms
from actors.kernels.gemm.cublaslt import (
    ALIGNED_BYTES,
    Algorithm,
    CublasLtPlan,
    Epilogue,
    GemmShape,
)
from actors.kernels.gemm.fp8 import Matrix, Weight
from actors.kernels.gemm.gemm import (
    CHOICES,
    FAVOUR,
    MOST_LAUNCHES,
    CublasLtGemm,
    Gemm,
    launches,
    tuning,
)
from actors.kernels.gemm.skinny_gemm import GemmTile, SkinnyGemm
from actors.kernels.hopper.cuda import LoadedKernel


def shape(rows: int, n: int = 4352, k: int = 1152) -> GemmShape:
    return GemmShape(rows, n, k, k, n, torch.bfloat16)


def test_a_measurement_of_any_shape_takes_about_as_long() -> None:
    assert launches(shape(64)) == MOST_LAUNCHES
    assert launches(shape(20_000)) == 2
    assert launches(shape(1_000_000)) == 1


@pytest.mark.parametrize("apart", [False, True])
def test_a_gemm_without_cublaslt_is_torch(*, apart: bool) -> None:
    weight, bias, x = torch.randn(6, 4), torch.randn(6), torch.randn(5, 4)
    expected = F.linear(x, weight, bias)
    rows = torch.zeros(5, 3, 6)
    with tuning():  # float32: nothing to choose from
        out = Gemm([weight], [bias], "bias")(0, x, rows[:, 1] if apart else None)
        added = Gemm([weight], None, "add")(0, x, bias.expand(5, 6).clone())
    assert torch.equal(out, expected)
    assert torch.equal(rows[:, 1], expected) == apart
    assert torch.allclose(added, expected, atol=1e-6)
    assert all(choice is None for choice in CHOICES.values())


ROWS, WIDTH, INNER = 6, 32, 136


class Chosen(CublasLtPlan):
    """A plan that says so when it runs."""

    def __init__(self) -> None:
        pass

    def run(
        self, algorithm: Algorithm, weight: Weight, bias: Tensor | None, x: Matrix, out: Matrix
    ) -> None:
        raise RuntimeError("chosen")


def test_an_algorithm_that_is_refused_when_it_runs_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused, taken = Algorithm(waves=1), Algorithm(waves=2)
    offered = [refused, taken]

    class Offered(CublasLtPlan):
        def __init__(self, shape: GemmShape, epilogue: Epilogue) -> None:
            pass

        def algorithms(self) -> list[Algorithm]:
            return offered

        def run(self, algorithm: Algorithm, *_: Matrix | Weight | None) -> None:
            if algorithm is refused:
                raise RuntimeError("cuBLASLt failed with code 15")

    def seconds(launch: Callable[[], None]) -> float:
        launch()
        return 1.0

    monkeypatch.setattr(gemms, "CublasLtPlan", Offered)
    monkeypatch.setattr(gemms, "graph_seconds", seconds)
    monkeypatch.setattr(gemms, "CHOICES", {})
    x = at(0, ROWS, WIDTH)
    for found in (taken, None):
        gemm = Gemm([at(0, INNER, WIDTH)], [at(0, INNER)], "bias")
        with tuning():
            gemm(0, x, at(0, ROWS, INNER))
        (choice,) = gemms.CHOICES.values()
        assert (choice.algorithm if isinstance(choice, CublasLtGemm) else None) is found
        gemms.CHOICES.clear()
        offered.pop()


class Ours(SkinnyGemm):
    """A kernel of our own that has nothing to launch."""

    def run(self, *_: Matrix | Weight | None) -> None:
        pass


@pytest.mark.parametrize(("ours_seconds", "taken"), [(1.03, Ours), (1.1, CublasLtGemm)])
def test_our_own_gemm_may_be_a_little_slower_alone(
    ours_seconds: float, taken: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Offered(CublasLtPlan):
        def __init__(self, shape: GemmShape, epilogue: Epilogue) -> None:
            pass

        def algorithms(self) -> list[Algorithm]:
            return [Algorithm()]

    times = iter([1.0, ours_seconds])
    ours = Ours(GemmTile(1, 64, 1, "bias"), LoadedKernel(c_void_p(), 160, 0))
    monkeypatch.setattr(gemms, "CublasLtPlan", Offered)
    monkeypatch.setattr(gemms, "skinny_gemms", lambda *_: [ours])
    monkeypatch.setattr(gemms, "graph_seconds", lambda _: next(times))
    monkeypatch.setattr(gemms, "CHOICES", {})
    monkeypatch.setattr(CublasLtGemm, "run", Ours.run)
    assert 1 / 1.1 < FAVOUR < 1 / 1.03
    with tuning():
        gemm = Gemm([at(0, INNER, WIDTH)], [at(0, INNER)], "bias")
        gemm(0, at(0, ROWS, WIDTH), at(0, ROWS, INNER))
    (choice,) = gemms.CHOICES.values()
    assert isinstance(choice, taken)


def at(offset_bytes: int, *shape: int) -> Tensor:
    """Random bfloat16 that begins so far behind a multiple of what algorithms expect."""
    size = 2 * torch.Size(shape).numel()
    whole = torch.empty(size + ALIGNED_BYTES + offset_bytes, dtype=torch.uint8)
    start = -whole.data_ptr() % ALIGNED_BYTES + offset_bytes
    return whole[start : start + size].view(torch.bfloat16).view(shape).normal_()


@pytest.mark.parametrize("epilogue", ["bias", "add"])
def test_matrices_aligned_unlike_the_timed_ones_take_torchs_gemm(
    epilogue: Epilogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = at(0, INNER, WIDTH), at(0, ROWS, WIDTH)
    bias = None if epilogue == "add" else [at(0, INNER)]
    gemm = Gemm([weight], bias, epilogue)
    rows = at(0, ROWS, 2 * INNER)
    first, second = rows.chunk(2, dim=1)
    timed = GemmShape(ROWS, INNER, WIDTH, WIDTH, 2 * INNER, torch.bfloat16)
    monkeypatch.setitem(CHOICES, (timed, epilogue), CublasLtGemm(Chosen(), Algorithm()))
    with pytest.raises(RuntimeError, match="chosen"):
        gemm(0, x, first)
    elsewhere = at(16, ROWS, WIDTH).copy_(x)
    for source, out in ((x, second), (elsewhere, first)):
        before = bias[0].float() if bias else out.float()
        expected = F.linear(x.float(), weight.float()) + before
        assert torch.allclose(gemm(0, source, out).float(), expected, rtol=1e-2, atol=1e-1)
