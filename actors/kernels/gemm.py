"""Linear layers by the fastest way that this device has for their shape: cuBLASLt's, or our own.

Its first choice is up to 14 % slower than its best (BENCHMARKS.md). What is captured is worth a
measurement: inside `tuning`, a product times the algorithms at its first sight of a number of rows.
Numbers of rows that were never tuned, as eager calls have them, take torch's way, and so do
columns of wider rows that begin where the algorithms do not expect it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.kernels.cublaslt import ALIGNED_BYTES, TYPES, Algorithm, Ending, Plan, Shape
from actors.kernels.skinny_gemm import FewRows, few_rows

MOST_LAUNCHES = 8
"""Of one algorithm in a row: as many layers' weights, so that none is found in the L2 cache."""
MEASURED_OPERATIONS = 5e11
"""A millisecond or so on a large GPU: what takes longer is launched less often in a row."""
REPEATS = 3
FAVOUR = 0.95
"""Products of our own save the gaps to their neighbours as well, which no measurement here sees."""

_tuning: ContextVar[bool] = ContextVar("tuning", default=False)


@contextmanager
def tuning() -> Iterator[None]:
    """Products that run inside choose their algorithms; on a stream that may be captured."""
    token = _tuning.set(True)
    try:
        yield
    finally:
        _tuning.reset(token)


@dataclass(frozen=True, slots=True)
class Planned:
    """How products of one shape are computed: by one of cuBLASLt's algorithms."""

    plan: Plan
    algorithm: Algorithm

    def run(self, weight: Tensor, bias: Tensor | None, x: Tensor, out: Tensor) -> None:
        """Enqueues one product on the current stream. RuntimeError if cuBLASLt refuses it."""
        self.plan.run(self.algorithm, weight, bias, x, out)


CHOICES: dict[tuple[Shape, Ending], Planned | FewRows | None] = {}
"""Of this process, which has one device: layers of the same shape share what one has measured."""


class Product:
    """The same linear layer of every block: weights [n, k], biases [n], in 16 bits."""

    def __init__(
        self, weights: Sequence[Tensor], biases: Sequence[Tensor] | None, ending: Ending
    ) -> None:
        assert (biases is None) == (ending == "add"), "This is a bug."
        assert all(weight.is_contiguous() for weight in weights), "This is a bug."
        self.weights = weights
        self.biases = biases
        self.ending = ending

    def __call__(self, layer: int, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x [rows, k], each row contiguous, to [rows, n]; with the ending "add", added to `out`.

        `out`: rows may lie apart, as columns of wider rows do.
        """
        weight = self.weights[layer]
        bias = self.biases[layer] if self.biases else None
        n, k = weight.shape
        stride = n if out is None else out.stride(0)
        shape = Shape(len(x), n, k, x.stride(0), stride, x.dtype)
        usual = aligned(weight, x, out)
        if usual and _tuning.get() and (shape, self.ending) not in CHOICES:
            CHOICES[shape, self.ending] = self._fastest(shape, x)
        choice = CHOICES.get((shape, self.ending))
        if choice is None or not usual:
            return self._plain(weight, bias, x, out)
        if out is None:
            out = x.new_empty(shape.rows, shape.n)
        choice.run(weight, bias, x, out)
        return out

    def _plain(self, weight: Tensor, bias: Tensor | None, x: Tensor, out: Tensor | None) -> Tensor:
        if bias is None:
            assert out is not None, "a product that adds needs what it adds to. This is a bug."
            return out.addmm_(x, weight.t())
        if self.ending == "gelu_tanh":
            result = torch._addmm_activation(bias, x, weight.t(), use_gelu=True)
        else:
            result = F.linear(x, weight, bias)
        return result if out is None else out.copy_(result)

    def _fastest(self, shape: Shape, x: Tensor) -> Planned | FewRows | None:
        """None: there is nothing for this shape but torch's way."""
        scratch = x.new_zeros(shape.rows, shape.out_stride)[:, : shape.n]
        timed = []
        for index, choice in enumerate(choices(shape, self.ending, x.device)):

            def launch(choice: Planned | FewRows = choice) -> None:
                for turn in range(launches(shape)):
                    layer = turn % len(self.weights)
                    bias = self.biases[layer] if self.biases else None
                    choice.run(self.weights[layer], bias, x, scratch)

            with suppress(RuntimeError):  # offered, and refused after all
                favour = FAVOUR if isinstance(choice, FewRows) else 1.0
                timed.append((graph_seconds(launch) * favour, index, choice))
        return min(timed)[2] if timed else None


def choices(shape: Shape, ending: Ending, device: torch.device) -> Iterator[Planned | FewRows]:
    """What there is for a product on this device."""
    if shape.dtype not in TYPES:
        return
    with suppress(OSError, RuntimeError):
        plan = Plan(shape, ending)
        yield from (Planned(plan, algorithm) for algorithm in plan.algorithms())
    yield from few_rows(shape, ending, device)


def launches(shape: Shape) -> int:
    """In a row, of an algorithm that is measured."""
    fitting = MEASURED_OPERATIONS / (2 * shape.rows * shape.n * shape.k)
    return max(1, min(MOST_LAUNCHES, int(fitting)))


def aligned(*matrices: Tensor | None) -> bool:
    """Whether they begin where the algorithms that were chosen expect it; None: allocated anew."""
    return not any(matrix.data_ptr() % ALIGNED_BYTES for matrix in matrices if matrix is not None)


def graph_seconds(launch: Callable[[], None]) -> float:
    """Of one replay of what is launched, the quickest of a few: without the host's own time."""
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
