"""How often a product is launched to be measured, and its plain way."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from actors.kernels.cublaslt import Shape
from actors.kernels.products import CHOICES, MOST_LAUNCHES, Product, launches, tuning


def shape(rows: int, n: int = 4352, k: int = 1152) -> Shape:
    return Shape(rows, n, k, k, n, torch.bfloat16)


def test_a_measurement_of_any_shape_takes_about_as_long() -> None:
    assert launches(shape(64)) == MOST_LAUNCHES
    assert launches(shape(20_000)) == 2
    assert launches(shape(1_000_000)) == 1


@pytest.mark.parametrize("apart", [False, True])
def test_a_product_without_cublaslt_is_torch(*, apart: bool) -> None:
    weight, bias, x = torch.randn(6, 4), torch.randn(6), torch.randn(5, 4)
    expected = F.linear(x, weight, bias)
    rows = torch.zeros(5, 3, 6)
    with tuning():  # float32: nothing to choose from
        out = Product([weight], [bias], "bias")(0, x, rows[:, 1] if apart else None)
        added = Product([weight], None, "add")(0, x, bias.expand(5, 6).clone())
    assert torch.equal(out, expected)
    assert torch.equal(rows[:, 1], expected) == apart
    assert torch.allclose(added, expected, atol=1e-6)
    assert all(choice is None for choice in CHOICES.values())
