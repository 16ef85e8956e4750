"""Picks the fastest GEMM for each layer shape: a cuBLASLt algorithm or our own kernel.

cuBLASLt's first choice is up to 14 % slower than its best algorithm (BENCHMARKS.md), so every
captured shape is timed once at start-up, inside `tuning`. Shapes that were never timed, such as
those of eager calls, use torch's GEMM, and so do matrices that are not `aligned`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.kernels.gemm.cublaslt import (
    ALIGNED_BYTES,
    TYPES,
    Algorithm,
    CublasLtPlan,
    Epilogue,
    GemmShape,
)
from actors.kernels.gemm.fp8 import (
    FEWEST_ROWS,
    Fp8Matrix,
    Fp8Weight,
    Matrix,
    Weight,
    rounded,
    scaled_mm,
    values,
)
from actors.kernels.gemm.skinny_gemm import SkinnyGemm, skinny_gemms

MOST_LAUNCHES = 8  # in a row, each with another layer's weights, so that L2 holds none of them
MEASURED_OPERATIONS = 5e11  # about 1 ms on a large GPU: larger shapes are launched less often
REPEATS = 3
PLAIN_ROWS = 1024  # rounded at a time in float32 by torch, to bound memory
FAVOUR = 0.95  # our kernel also saves gaps to its neighbours, which the timing cannot see

_tuning: ContextVar[bool] = ContextVar("tuning", default=False)


@contextmanager
def tuning() -> Iterator[None]:
    """Within the context, GEMMs time their algorithms. The current stream must be capturable."""
    token = _tuning.set(True)
    try:
        yield
    finally:
        _tuning.reset(token)


@dataclass(frozen=True, slots=True)
class CublasLtGemm:
    plan: CublasLtPlan
    algorithm: Algorithm

    def run(self, weight: Weight, bias: Tensor | None, x: Matrix, out: Matrix) -> None:
        self.plan.run(self.algorithm, weight, bias, x, out)


CHOICES: dict[tuple[GemmShape, Epilogue], CublasLtGemm | SkinnyGemm | None] = {}
"""The choices of this process, which has one device. Layers of the same shape share a choice. None:
torch's GEMM."""


class Gemm:
    """The same linear layer of every block: weights [n, k] and biases [n] in 16 bits. Some layers
    have their weights in FP8, too."""

    def __init__(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor] | None,
        epilogue: Epilogue,
        fp8: Sequence[Fp8Weight | None] = (),
    ) -> None:
        assert (biases is None) == (epilogue == "add"), "This is a bug."
        assert all(weight.is_contiguous() for weight in weights), "This is a bug."
        self.weights = weights
        self.biases = biases
        self.epilogue = epilogue
        self.fp8: Sequence[Fp8Weight | None] = fp8 or [None] * len(weights)

    def scales(self, layer: int, rows: int) -> Tensor | None:
        """The scales of x in FP8 if it has this many rows. None: it should be in 16 bits."""
        weight = self.fp8[layer]
        return weight.scales if weight and rows >= FEWEST_ROWS else None

    def __call__(self, layer: int, x: Matrix, out: Tensor | None = None) -> Tensor:
        """x [rows, k], each row contiguous, to [rows, n]; with the epilogue "add", added to `out`.

        `out`: may be some columns of a wider matrix. If x is in FP8, so are the weights that are
        used.
        """
        bias = self.biases[layer] if self.biases else None
        given = out if out is not None else bias
        assert given is not None, "the epilogue add needs an output. This is a bug."
        made = given.new_empty(len(x), len(self.weights[layer])) if out is None else out
        self._run(layer, x, made, given.dtype)
        return made

    def to_fp8(self, layer: int, x: Fp8Matrix, scales: Tensor) -> Fp8Matrix:
        """Like __call__, with the result in FP8, too. `scales`: [1]. Not with the epilogue
        "add"."""
        weight = self.weights[layer]
        empty = weight.new_empty(len(x), len(weight), dtype=torch.float8_e4m3fn)
        made = Fp8Matrix(empty, scales)
        self._run(layer, x, made, weight.dtype)
        return made

    def _run(self, layer: int, x: Matrix, out: Matrix, dtype: torch.dtype) -> None:
        weight, bias = self._pairs(x)[layer]
        assert weight is not None, "the layer is not in FP8. This is a bug."
        n, k = values(weight).shape
        strides = values(x).stride(0), values(out).stride(0)
        fp8 = isinstance(x, Fp8Matrix), isinstance(out, Fp8Matrix)
        shape = GemmShape(len(x), n, k, *strides, dtype, *fp8)
        usual = aligned(values(weight), values(x), values(out))
        if usual and _tuning.get() and (shape, self.epilogue) not in CHOICES:
            CHOICES[shape, self.epilogue] = self._fastest(shape, x, out)
        choice = CHOICES.get((shape, self.epilogue))
        if choice is None or not usual:
            self._plain(weight, bias, x, out, dtype)
        else:
            choice.run(weight, bias, x, out)

    def _pairs(self, x: Matrix) -> list[tuple[Weight | None, Tensor | None]]:
        """For each layer, the weight in the format of x, and the bias."""
        weights: Sequence[Weight | None] = self.weights if isinstance(x, Tensor) else self.fp8
        biases: Sequence[Tensor | None] = self.biases or [None] * len(weights)
        return list(zip(weights, biases, strict=True))

    def _plain(
        self, weight: Weight, bias: Tensor | None, x: Matrix, out: Matrix, dtype: torch.dtype
    ) -> None:
        if isinstance(weight, Fp8Weight) and isinstance(x, Fp8Matrix):
            made = scaled_mm(x, weight, bias, dtype)
            if self.epilogue == "gelu_tanh":
                made = F.gelu(made, approximate="tanh")
            if isinstance(out, Fp8Matrix):
                for some, to in zip(
                    made.split(PLAIN_ROWS), out.values.split(PLAIN_ROWS), strict=True
                ):
                    to.copy_(rounded(some, out.scales).values)
            elif self.epilogue == "add":
                out.add_(made)
            else:
                out.copy_(made)
            return
        x, weight, out = values(x), values(weight).t(), values(out)
        added = out if bias is None else bias
        if self.epilogue == "gelu_tanh":
            torch._addmm_activation(added, x, weight, use_gelu=True, out=out)
        else:
            torch.addmm(added, x, weight, out=out)

    def _fastest(
        self, shape: GemmShape, x: Matrix, out: Matrix
    ) -> CublasLtGemm | SkinnyGemm | None:
        """The fastest choice. None: only torch's GEMM takes this shape."""
        kind = values(out).dtype
        zeros = values(x).new_zeros(shape.rows, shape.out_stride, dtype=kind)[:, : shape.n]
        scratch = Fp8Matrix(zeros, out.scales) if isinstance(out, Fp8Matrix) else zeros
        pairs = [(weight, bias) for weight, bias in self._pairs(x) if weight is not None]
        timed = []
        for index, choice in enumerate(choices(shape, self.epilogue, values(x).device)):

            def launch(choice: CublasLtGemm | SkinnyGemm = choice) -> None:
                for turn in range(launches(shape)):
                    weight, bias = pairs[turn % len(pairs)]
                    choice.run(weight, bias, x, scratch)

            with suppress(RuntimeError):  # offered, but rejected when it runs
                favour = FAVOUR if isinstance(choice, SkinnyGemm) else 1.0
                timed.append((graph_seconds(launch) * favour, index, choice))
        return min(timed)[2] if timed else None


def choices(
    shape: GemmShape, epilogue: Epilogue, device: torch.device
) -> Iterator[CublasLtGemm | SkinnyGemm]:
    """Everything that can compute this shape on this device."""
    if shape.dtype not in TYPES:
        return
    with suppress(OSError, RuntimeError):
        plan = CublasLtPlan(shape, epilogue)
        yield from (CublasLtGemm(plan, algorithm) for algorithm in plan.algorithms())
    if not shape.fp8:
        yield from skinny_gemms(shape, epilogue, device)


def launches(shape: GemmShape) -> int:
    fitting = MEASURED_OPERATIONS / (2 * shape.rows * shape.n * shape.k)
    return max(1, min(MOST_LAUNCHES, int(fitting)))


def aligned(*matrices: Tensor) -> bool:
    """Whether the matrices are aligned as the timed algorithms expect."""
    return not any(matrix.data_ptr() % ALIGNED_BYTES for matrix in matrices)


def graph_seconds(launch: Callable[[], None]) -> float:
    """Seconds that a graph of what `launch` enqueues takes: the fastest of a few replays."""
    launch()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        launch()
    finally:
        graph.capture_end()
    quickest = float("inf")
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        quickest = min(quickest, start.elapsed_time(end) / 1e3)
    return quickest
