"""The Triton kernels and the fast blocks against plain torch in float32."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from actors.attention import Attention, SegmentAttention, Values
from actors.models.block import (
    WINDOW,
    Affine,
    BlockWeights,
    ReferenceBlocks,
    Style,
    rotate,
)

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")

from actors.kernels import hopper  # noqa: E402
from actors.kernels.cublaslt import Ending  # noqa: E402
from actors.kernels.hopper_tiles import HopperTiles  # noqa: E402
from actors.kernels.norm import norm  # noqa: E402
from actors.kernels.positions import add_positions_  # noqa: E402
from actors.kernels.products import Product, tuning  # noqa: E402
from actors.kernels.rotary import rotate_  # noqa: E402
from actors.kernels.shift import shifted  # noqa: E402
from actors.kernels.swiglu import swiglu  # noqa: E402
from actors.kernels.tiles import HEAD_SIZES, Tiles  # noqa: E402
from actors.models.fast import FastBlocks  # noqa: E402

KERNELS = [
    *((size, torch.bfloat16) for size in HEAD_SIZES),
    *((size, torch.float16) for size in (64, 72, 128)),
]
"""Each is compiled for seconds, in two forms."""
LAYOUTS = [[400], [1], [63, 64, 65], [1, 127, 128, 129, 400], [1100, 4, 2048]]


@pytest.fixture(autouse=True)
def on_device() -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.manual_seed(0)
    with torch.device("cuda"):
        yield


def difference(value: Tensor, expected: Tensor) -> float:
    """Relative; not a number if either holds one."""
    return float((value.float() - expected.float()).norm() / expected.float().norm())


def on_gpu(values: Values) -> dict[str, Tensor]:
    return {name: value.cuda() for name, value in values.items()}


def expected_attention(qkv: Tensor, lengths: list[int]) -> Tensor:
    reference = SegmentAttention()
    return reference(qkv.float(), reference.metadata(lengths, len(qkv), len(lengths)))


@pytest.mark.parametrize("lengths", LAYOUTS, ids=str)
@pytest.mark.parametrize(("size", "dtype"), KERNELS, ids=str)
def test_attention_in_every_head_size_and_budget(
    size: int, dtype: torch.dtype, lengths: list[int]
) -> None:
    used, tiles = sum(lengths), Tiles()
    for patches in (used, used + 37, 8192):
        qkv = torch.randn(patches, 3, 4, size, dtype=dtype)
        qkv[used:] = float("nan")
        values = on_gpu(tiles.metadata(lengths, patches, 16))
        out = tiles(qkv.clone(), values)[:used]
        assert difference(out, expected_attention(qkv[:used], lengths)) < 4e-3


@pytest.mark.parametrize("patches", [600, 4096])
def test_a_poisoned_neighbour_stays_alone(patches: int) -> None:
    lengths, tiles = [100, 200, 300], Tiles()
    qkv = torch.randn(patches, 3, 2, 72, dtype=torch.bfloat16)
    values = on_gpu(tiles.metadata(lengths, patches, 3))
    clean = tiles(qkv.clone(), values).clone()
    qkv[100:300] = float("nan")
    out = tiles(qkv.clone(), values)
    assert torch.equal(out[:100], clean[:100])
    assert torch.equal(out[300:600], clean[300:600])


def hopper_tiles(size: int, dtype: torch.dtype) -> HopperTiles:
    if torch.cuda.get_device_capability() != hopper.CAPABILITY:
        pytest.skip("not compute capability 9.0")
    kernel = hopper.kernel_for(torch.device("cuda"), dtype, size)
    assert kernel, "hopper.cu does not compile"
    return HopperTiles(kernel)


# One strip, blocks of keys filled and not, strips cut from a last round of tiles, all at once.
HOPPER_LAYOUTS = [
    [1],
    [79, 80, 81, 95, 96, 97, 193],
    [2048, 1, 128, 129, 160],
    [300] * 40,
    [8160],
    [2600] * 3,
]


@pytest.mark.parametrize("lengths", HOPPER_LAYOUTS, ids=str)
@pytest.mark.parametrize("size", hopper.SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_hopper_equals_plain_attention_and_leaves_keys_and_values(
    size: int, lengths: list[int], dtype: torch.dtype
) -> None:
    tiles, used = hopper_tiles(size, dtype), sum(lengths)
    for patches in (used + 9, used + 1200):
        qkv = torch.randn(patches, 3, 16, size, dtype=dtype)
        qkv[used:] = float("nan")
        values = on_gpu(tiles.metadata(lengths, patches, len(lengths) + 3))
        written = qkv.clone()
        out = tiles(written, values)[:used]
        assert difference(out, expected_attention(qkv[:used], lengths)) < 4e-3
        assert torch.equal(written[:used, 1:], qkv[:used, 1:])
        assert written[used:].isnan().all()


@pytest.mark.parametrize("patches", [600, 4096])
def test_on_hopper_too_a_poisoned_neighbour_stays_alone(patches: int) -> None:
    lengths, tiles = [100, 200, 300], hopper_tiles(72, torch.bfloat16)
    qkv = torch.randn(patches, 3, 2, 72, dtype=torch.bfloat16)
    values = on_gpu(tiles.metadata(lengths, patches, 3))
    clean = tiles(qkv.clone(), values).clone()
    qkv[100:300] = float("nan")
    out = tiles(qkv.clone(), values)
    assert torch.equal(out[:100], clean[:100])
    assert torch.equal(out[300:600], clean[300:600])


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("patches", [1000, 3000])
def test_on_hopper_scores_may_grow_without_bound(patches: int, sign: int) -> None:
    tiles = hopper_tiles(64, torch.bfloat16)
    qkv = torch.randn(patches, 3, 2, 64, dtype=torch.bfloat16)
    # Up to hundreds, all of one sign, and larger from key to key.
    qkv[:, 0] = sign
    qkv[:, 1] = qkv[:, 1].abs() * torch.linspace(0, 60, patches)[:, None, None]
    values = on_gpu(tiles.metadata([patches], patches, 1))
    expected = expected_attention(qkv, [patches])
    assert difference(tiles(qkv.clone(), values), expected) < 4e-3


@pytest.mark.parametrize("rows", [1, 399, 4097])
@pytest.mark.parametrize("width", [1024, 1152, 4608])
@pytest.mark.parametrize("centred", [True, False])
def test_norm(rows: int, width: int, centred: bool) -> None:
    x, weight, bias = (
        torch.randn(shape, dtype=torch.bfloat16) for shape in ((rows, width), width, width)
    )
    shift = torch.randn(width)
    if not centred:
        bias.zero_()
    plain = F.layer_norm if centred else F.rms_norm
    expected = plain(x.float() + shift, (width,), weight.float(), eps=1e-6) + bias.float()
    assert difference(norm(x, shift, weight, bias, 1e-6, centred=centred), expected) < 4e-3


def test_shifted_in_place_or_not() -> None:
    x, shift = torch.randn(301, 1152, dtype=torch.bfloat16), torch.randn(1152)
    expected = (x.float() + shift).bfloat16()
    assert torch.equal(shifted(x, shift, torch.empty_like(x)), expected)
    shifted(x, shift, x)
    assert torch.equal(x, expected)


def test_swiglu() -> None:
    x = torch.randn(301, 2 * 3420, dtype=torch.bfloat16)
    gate, up = x.float().chunk(2, -1)
    assert difference(swiglu(x), F.silu(gate) * up) < 4e-3


def test_a_product_among_the_columns_of_wider_rows() -> None:
    weight, bias = torch.randn(512, 256).bfloat16(), torch.randn(512).bfloat16()
    product, x = Product([weight], [bias], "bias"), torch.randn(130, 256).bfloat16()
    rows = torch.zeros(130, 3, 512, dtype=torch.bfloat16)
    product(0, x, rows[:, 1])
    with torch.cuda.stream(torch.cuda.Stream()), tuning():
        product(0, x, rows[:, 2])
        torch.cuda.synchronize()
    expected = F.linear(x.float(), weight.float(), bias.float())
    assert not rows[:, 0].any()
    for each in (1, 2):
        assert difference(rows[:, each], expected) < 4e-3


@pytest.mark.parametrize("ending", ["bias", "gelu_tanh", "add"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_tuned_or_not(ending: Ending, dtype: torch.dtype) -> None:
    rows, width, inner = 401, 1152, 4352
    weights = [(torch.randn(inner, width) / width**0.5).to(dtype) for _ in range(3)]
    biases = [torch.randn(inner).to(dtype) for _ in range(3)]
    product = Product(weights, None if ending == "add" else biases, ending)
    x = torch.randn(rows, 3, width).to(dtype)[:, 0]  # rows lie apart, as attention leaves them
    before = torch.randn(rows, inner).to(dtype)

    def run() -> Tensor:
        return product(1, x, before.clone() if ending == "add" else None)

    expected = F.linear(x.float(), weights[1].float())
    expected = expected + (before if ending == "add" else biases[1]).float()
    if ending == "gelu_tanh":
        expected = F.gelu(expected, approximate="tanh")
    plain = run()
    assert not product.choices
    with torch.cuda.stream(torch.cuda.Stream()), tuning():
        run()
        torch.cuda.synchronize()
    assert all(product.choices.values())
    tuned = run()
    assert difference(plain, expected) < 4e-3
    assert difference(tuned, expected) < 4e-3


@pytest.mark.parametrize("size", [64, 72])
def test_rotary_is_the_reference_and_leaves_v(size: int) -> None:
    qkv = torch.randn(401, 3, 16, size, dtype=torch.bfloat16)
    cos, sin = torch.randn(401, size // 2), torch.randn(401, size // 2)
    expected, value = rotate(qkv[:, :2], cos, sin), qkv[:, 2].clone()
    rotate_(qkv, cos, sin)
    assert difference(qkv[:, :2], expected) < 1e-3
    assert torch.equal(qkv[:, 2], value)


@pytest.mark.parametrize("width", [1024, 1152])
def test_positions(width: int) -> None:
    x, table = torch.randn(301, width).bfloat16(), torch.randn(2304, width).bfloat16()
    taps, weights = torch.randint(2304, (301, 4), dtype=torch.int32), torch.rand(301, 4)
    expected = x.float() + (table.float()[taps.long()] * weights[..., None]).sum(1)
    add_positions_(x, table, taps, weights)
    assert difference(x, expected) < 4e-3


def random_blocks(layers: int, width: int, inner: int, style: Style) -> list[BlockWeights]:
    gates = 2 if style.activation == "swiglu" else 1

    def linear(rows: int, columns: int) -> Affine:
        return Affine(torch.randn(rows, columns) / columns**0.5, torch.randn(rows) / 10)

    def norm() -> Affine:
        bias = torch.randn(width) / 10 if style.norm == "layer" else torch.zeros(width)
        return Affine(1 + torch.randn(width) / 10, bias)

    return [
        BlockWeights(
            norm1=norm(),
            qkv=linear(3 * width, width),
            proj=linear(width, width),
            norm2=norm(),
            up=linear(gates * inner, width),
            down=linear(width, inner),
        )
        for _ in range(layers)
    ]


def seen_by(
    attention: Attention, lengths: list[int], windows: list[int], patches: int
) -> dict[str, Tensor]:
    """What the attention reads for whole segments and for windows."""
    whole = attention.metadata(lengths, patches, 4)
    parts = attention.metadata(windows, patches, 12)
    return on_gpu(whole | {WINDOW + name: value for name, value in parts.items()})


def cast(layer: BlockWeights, dtype: torch.dtype) -> BlockWeights:
    def part(affine: Affine) -> Affine:
        return Affine(affine.weight.to(dtype), affine.bias.to(dtype))

    return BlockWeights(
        norm1=part(layer.norm1),
        qkv=part(layer.qkv),
        proj=part(layer.proj),
        norm2=part(layer.norm2),
        up=part(layer.up),
        down=part(layer.down),
    )


STYLES = [
    Style(16, "gelu_tanh"),
    Style(16, "gelu"),
    Style(16, "swiglu", norm="rms", windowed=frozenset({0, 2})),
]


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.activation)
def test_fast_blocks_round_no_worse_than_the_reference(style: Style) -> None:
    lengths, patches = [400, 100, 148], 1024
    windows = [64] * 10 + [8]
    exact = random_blocks(4, 1152, 4304, style)
    half = [cast(layer, torch.bfloat16) for layer in exact]
    whole = [cast(layer, torch.float32) for layer in half]
    x = torch.randn(patches, 1152, dtype=torch.bfloat16)
    angle = torch.rand(patches, 36) * 6
    cos, sin = angle.cos(), angle.sin()
    segments, tiles = SegmentAttention(), Tiles()
    plain = seen_by(segments, lengths, windows, patches)
    last, taps = ReferenceBlocks(whole, style, segments, [1])(x.float(), cos, sin, plain)
    half_last, half_taps = ReferenceBlocks(half, style, segments, [1])(x, cos, sin, plain)
    fast = FastBlocks(half, style, tiles, [1])
    values = seen_by(tiles, lengths, windows, patches)
    fast_last, fast_taps = fast(x.clone(), cos, sin, values)
    used = sum(lengths)
    for ours, theirs, true in ((fast_last, half_last, last), (fast_taps[0], half_taps[0], taps[0])):
        assert difference(ours[:used], true[:used]) < 1.2 * difference(theirs[:used], true[:used])
    assert fast_last.isfinite().all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = fast(x.clone(), cos, sin, values)
    graph.replay()
    assert torch.equal(captured[:used], fast_last[:used])
    x[used:] = float("nan")
    graph.replay()
    assert torch.equal(captured[:used], fast_last[:used])
