"""How the GPU's results are compared with plain torch's."""

from __future__ import annotations

from torch import Tensor

from actors.kernels.attention import Values


def difference(value: Tensor, expected: Tensor) -> float:
    """Relative; not a number if either holds one."""
    return float((value.double() - expected.double()).norm() / expected.double().norm())


def on_gpu(values: Values) -> dict[str, Tensor]:
    """Inputs that were made on the host."""
    return {name: value.cuda() for name, value in values.items()}
