"""ctypes bindings for cuBLASLt, which comes with torch: GEMM descriptions and their algorithms.

torch's dependencies include no binding for it. Matrices are row-major here and column-major in
cuBLASLt, so out [rows, n] = x [rows, k] times weight [n, k] transposed is n x rows = (k x n)
transposed times (k x rows) there.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int, c_int8, c_int64, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from actors.kernels.gemm.fp8 import Fp8Matrix, Fp8Weight, Matrix, Weight, values

Epilogue = Literal["bias", "gelu_tanh", "add"]
"""What a GEMM does with its result: adds a bias; adds a bias and applies GELU (tanh); adds the
result to the output."""

COMPUTE_32F, REAL_32F = 68, 0
TYPES = {torch.bfloat16: 14, torch.float16: 2, torch.float8_e4m3fn: 28}
EPILOGUES: dict[Epilogue, int] = {"bias": 4, "gelu_tanh": 36, "add": 1}
# Attributes of a matmul description.
TRANSPOSE_FIRST, EPILOGUE, BIAS_POINTER, FAST_ACCUMULATION, BIAS_TYPE = 3, 7, 8, 25, 26
OUT_SCALE_POINTER = 20
MAX_WORKSPACE_BYTES = 1  # attribute of a preference
MOST_ALGORITHMS = 8

ALIGNED_BYTES = 256  # alignment of matrices that cuBLASLt assumes when it offers algorithms


class Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", c_uint64 * 8),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


@dataclass(frozen=True, slots=True)
class GemmShape:
    """x [rows, k] times weight [n, k] transposed gives out [rows, n]. Strides are between rows, in
    elements."""

    rows: int
    n: int
    k: int
    x_stride: int
    out_stride: int
    dtype: torch.dtype
    """The dtype of the bias, and of what is not in FP8."""
    fp8: bool = False
    """Whether x and weight are in FP8."""
    fp8_out: bool = False
    """Whether out is in FP8. Its bias is not."""


class CublasLtPlan:
    """GEMMs of one shape. The descriptions are never freed, because there are few."""

    def __init__(self, shape: GemmShape, epilogue: Epilogue) -> None:
        self.calls, self.handle = loaded()
        self.description = c_void_p()
        self._call("MatmulDescCreate", byref(self.description), COMPUTE_32F, REAL_32F)
        self._describe(TRANSPOSE_FIRST, c_int(1))
        self._describe(EPILOGUE, c_int(EPILOGUES[epilogue]))
        if shape.fp8:
            self._describe(FAST_ACCUMULATION, c_int8(1))
        if shape.fp8_out:
            self._describe(BIAS_TYPE, c_int(TYPES[shape.dtype]))
            # Only `run` sets a real pointer.
            self._describe(OUT_SCALE_POINTER, c_uint64(ALIGNED_BYTES))
        inputs, out = (
            torch.float8_e4m3fn if fp8 else shape.dtype for fp8 in (shape.fp8, shape.fp8_out)
        )
        self.weight = self._layout(inputs, shape.k, shape.n, shape.k)
        self.x = self._layout(inputs, shape.k, shape.rows, shape.x_stride)
        self.out = self._layout(out, shape.n, shape.rows, shape.out_stride)
        # What the result is added to is in 16 bits, even if nothing is added.
        self.before = self._layout(shape.dtype, shape.n, shape.rows, shape.out_stride)
        self.keep = c_float(1.0 if epilogue == "add" else 0.0)

    def algorithms(self) -> list[Algorithm]:
        """The algorithms that cuBLASLt offers without a workspace, its first choice first. May be
        empty."""
        preference, found = c_void_p(), c_int()
        self._call("MatmulPreferenceCreate", byref(preference))
        most = c_uint64(0)
        self._call(
            "MatmulPreferenceSetAttribute",
            *(preference, MAX_WORKSPACE_BYTES, byref(most), c_size_t(ctypes.sizeof(most))),
        )
        results = (Algorithm * MOST_ALGORITHMS)()
        # The return code only says whether there are any.
        self.calls.cublasLtMatmulAlgoGetHeuristic(
            *(self.handle, self.description, self.weight, self.x, self.before, self.out),
            *(preference, MOST_ALGORITHMS, results, byref(found)),
        )
        self._call("MatmulPreferenceDestroy", preference)
        return [result for result in results[: found.value] if result.state == 0]

    def run(
        self, algorithm: Algorithm, weight: Weight, bias: Tensor | None, x: Matrix, out: Matrix
    ) -> None:
        """Enqueues one GEMM on the current stream. Raises RuntimeError if cuBLASLt rejects it."""
        if bias is not None:
            self._describe(BIAS_POINTER, c_uint64(bias.data_ptr()))
        factor = weight.factor if isinstance(weight, Fp8Weight) else 1.0
        before = values(out)
        if isinstance(out, Fp8Matrix):
            self._describe(OUT_SCALE_POINTER, c_uint64(out.scales.data_ptr()))
            before = values(weight)  # any but `out`, which cuBLASLt rejects; it is not read
        self._call(
            "Matmul",
            *(self.handle, self.description, byref(c_float(factor))),
            *(c_void_p(values(weight).data_ptr()), self.weight),
            *(c_void_p(values(x).data_ptr()), self.x),
            *(byref(self.keep), c_void_p(before.data_ptr()), self.before),
            *(c_void_p(values(out).data_ptr()), self.out),
            *(byref(algorithm.algorithm), None, c_size_t(0)),
            c_void_p(torch.cuda.current_stream().cuda_stream),
        )

    def _describe(self, attribute: int, value: c_int | c_int8 | c_uint64) -> None:
        self._call(
            "MatmulDescSetAttribute",
            *(self.description, attribute, byref(value), c_size_t(ctypes.sizeof(value))),
        )

    def _layout(self, dtype: torch.dtype, rows: int, columns: int, stride: int) -> c_void_p:
        layout = c_void_p()
        self._call(
            "MatrixLayoutCreate",
            *(byref(layout), TYPES[dtype], c_uint64(rows), c_uint64(columns), c_int64(stride)),
        )
        return layout

    def _call(self, name: str, *arguments: object) -> None:
        check(f"cublasLt{name}", self.calls[f"cublasLt{name}"](*arguments))


@cache
def loaded() -> tuple[ctypes.CDLL, c_void_p]:
    """The cuBLASLt of torch's CUDA release, and a handle. Raises OSError if there is none."""
    major = (torch.version.cuda or "13").split(".")[0]
    calls, handle = ctypes.CDLL(f"libcublasLt.so.{major}"), c_void_p()
    check("cublasLtCreate", calls.cublasLtCreate(byref(handle)))
    return calls, handle


def check(call: str, code: int) -> None:
    if code:
        raise RuntimeError(f"{call} failed with code {code}")
