"""The fast blocks against the reference, in float32 and in the same dtype."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from actors.kernels.attention import Attention, SegmentAttention
from actors.models.layers.block import WINDOW, Affine, BlockWeights, ReferenceBlocks, Style
from tests.gpu.compared import difference, on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_device")]
pytest.importorskip("triton")

from actors.kernels.attention import TritonAttention  # noqa: E402
from actors.models.layers.fast import FastBlocks  # noqa: E402


def random_blocks(layers: int, width: int, inner: int, style: Style) -> list[BlockWeights]:
    gates = 2 if style.activation.startswith("swiglu") else 1

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
    Style(16, "swiglu_10", norm="rms"),
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
    segments, tiles = SegmentAttention(), TritonAttention()
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
