"""How the GPU's results are compared with plain torch's."""

from __future__ import annotations

from torch import Tensor

from actors.kernels.attention import Values
from actors.kernels.gemm.fp8 import Fp8Matrix


def difference(value: Tensor, expected: Tensor) -> float:
    """Relative; not a number if either holds one."""
    return float((value.double() - expected.double()).norm() / expected.double().norm())


def restored(matrix: Fp8Matrix) -> Tensor:
    """What the matrix stands for, in float32."""
    return matrix.values.float() / matrix.scales


def on_gpu(values: Values) -> dict[str, Tensor]:
    """Inputs that were made on the host."""
    return {name: value.cuda() for name, value in values.items()}
