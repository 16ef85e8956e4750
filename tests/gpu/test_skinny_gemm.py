"""GEMMs with few rows by our own kernel, against plain torch in float32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.gpu.compared import difference

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_device")]
pytest.importorskip("triton")

from actors.kernels.gemm.cublaslt import Epilogue, GemmShape  # noqa: E402
from actors.kernels.gemm.skinny_gemm import (  # noqa: E402
    GemmTile,
    SkinnyGemm,
    kernel_for,
    skinny_gemms,
)
from actors.kernels.hopper.cuda import CAPABILITY  # noqa: E402
from actors.kernels.triton.elementwise import norm  # noqa: E402

TILES = [(1, 64, 1), (2, 104, 1), (3, 88, 1), (1, 208, 3), (2, 72, 2), (1, 144, 4)]
"""Groups, rows and splits: whole and partial tiles, even and uneven shares."""


@pytest.fixture(autouse=True)
def hopper(on_device: None) -> None:
    if torch.cuda.get_device_capability() != CAPABILITY:
        pytest.skip("not of compute capability 9.0")


def expected(x: Tensor, weight: Tensor, bias: Tensor, before: Tensor, epilogue: Epilogue) -> Tensor:
    product = x.float() @ weight.float().T
    if epilogue == "add":
        return product + before.float()
    product += bias.float()
    return F.gelu(product, approximate="tanh") if epilogue == "gelu_tanh" else product


def run_alone(tile: GemmTile, x: Tensor, weight: Tensor, bias: Tensor, out: Tensor) -> None:
    SkinnyGemm(tile, kernel_for(x.device, x.dtype, tile)).run(
        weight, None if tile.epilogue == "add" else bias, x, out
    )


@pytest.mark.parametrize("form", TILES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("epilogue", ["bias", "gelu_tanh", "add"])
def test_every_form_of_tile(
    form: tuple[int, int, int], dtype: torch.dtype, epilogue: Epilogue
) -> None:
    groups, rows, splits = form
    if splits > 1 and epilogue != "add":
        pytest.skip("only sums that are added to something are split")
    tile = GemmTile(groups, rows, splits, epilogue)
    for count, n, k in ((400, 1152, 1152), (1, 64 * groups + 8, 328), (rows + 9, 520, 4304)):
        weight, bias = (torch.randn(n, k) / k**0.5).to(dtype), torch.randn(n).to(dtype)
        wide = torch.randn(count, 3, k).to(dtype)  # rows lie apart, as attention leaves them
        before = torch.randn(count + 1, n).to(dtype)
        out = before.clone()
        run_alone(tile, wide[:, 0], weight, bias, out[:count])
        wanted = expected(wide[:, 0], weight, bias, before[:count], epilogue)
        assert difference(out[:count], wanted) < 4e-3
        assert torch.equal(out[count:], before[count:])


def test_the_same_bits_every_time_and_in_a_graph_of_overlapping_kernels() -> None:
    """A chain whose every kernel reads what the one in front of it has just written."""
    layers, rows, width = 12, 400, 1152
    weights = [(torch.randn(width, width) / width**0.5).bfloat16() for _ in range(layers)]
    first, still = torch.randn(rows, width).bfloat16(), torch.zeros(width)
    scale, bias = torch.ones(width).bfloat16(), torch.zeros(width).bfloat16()
    shape = GemmShape(rows, width, width, width, width, torch.bfloat16)
    way = skinny_gemms(shape, "add", first.device)[0]
    x = first.clone()

    def chain() -> None:
        x.copy_(first)
        for weight in weights:
            way.run(weight, None, norm(x, still, scale, bias, 1e-6, centred=True), x)

    wanted = first.float()
    for weight in weights:
        wanted = wanted + F.layer_norm(wanted, (width,), eps=1e-6) @ weight.float().T
    with torch.cuda.stream(torch.cuda.Stream()):
        chain()
        torch.cuda.synchronize()
        eager = x.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain()
        for _ in range(20):
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(x, eager)
    assert difference(eager, wanted) < 2e-2


def test_shapes_without_a_way() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    many = GemmShape(4096, 1152, 1152, 1152, 1152, torch.bfloat16)
    odd = GemmShape(400, 1151, 1152, 1152, 1151, torch.bfloat16)
    tiny = GemmShape(400, 96, 32, 32, 96, torch.bfloat16)
    assert not skinny_gemms(many, "bias", device)
    assert not skinny_gemms(odd, "bias", device)
    assert not skinny_gemms(tiny, "bias", device)
