"""Blocks through torch.compile: the same rows, compiled once for all numbers of them and layers."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from actors.kernels.attention import SegmentAttention
from actors.models.layers.block import (
    WINDOW,
    Affine,
    Blocks,
    BlockWeights,
    CompiledBlocks,
    ReferenceBlocks,
    Style,
)

pytestmark = [
    pytest.mark.extended,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch's compiler, by itself
]

WIDTH, HEADS, MLP, LAYERS = 32, 2, 48, 4

STYLES = (
    Style(HEADS, "gelu_tanh"),
    Style(HEADS, "gelu", norm="rms"),
    Style(HEADS, "swiglu", norm="rms", windowed=frozenset({0, 2})),
    Style(HEADS, "quick_gelu", post_norm=True),
    Style(HEADS, "geglu_tanh", norm="rms", both_norms=True),
)


def layer(style: Style, generator: torch.Generator, *, qk_norm: bool) -> BlockWeights:
    def affine(rows: int, *columns: int) -> Affine:
        weight = torch.randn(rows, *columns, generator=generator) / WIDTH**0.5
        name = str(float(weight.sum()))  # layers have names of their own
        return Affine(weight, torch.randn(rows, generator=generator), name=name)

    return BlockWeights(
        norm1=affine(WIDTH),
        qkv=affine(3 * WIDTH, WIDTH),
        proj=affine(WIDTH, WIDTH),
        norm2=affine(WIDTH),
        up=affine(MLP * (1 + ("glu" in style.activation)), WIDTH),
        down=affine(WIDTH, MLP),
        qk_norm=torch.rand(2, WIDTH, generator=generator) if qk_norm else None,
        after=(affine(WIDTH), affine(WIDTH)) if style.both_norms else None,
    )


@pytest.mark.parametrize("rotary", [True, False])
@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("style", STYLES, ids=lambda style: f"{style.norm}-{style.activation}")
def test_compiled_blocks_give_the_same_rows(style: Style, qk_norm: bool, rotary: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    weights = [layer(style, generator, qk_norm=qk_norm) for _ in range(LAYERS)]
    attention = SegmentAttention()
    plain, compiled = (
        form(weights, style, attention, (1,)) for form in (ReferenceBlocks, CompiledBlocks)
    )
    torch.compiler.reset()
    counters.clear()
    with torch.inference_mode():
        for rows in (24, 40, 96):
            assert_equal(plain, compiled, attention, rows, rotary=rotary)
            assert counters["stats"]["unique_graphs"] == 2, "the two halves of a block, once each"


def assert_equal(
    plain: Blocks, compiled: Blocks, attention: SegmentAttention, rows: int, *, rotary: bool
) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, WIDTH, generator=generator)
    angles = torch.randn(2, rows, WIDTH // HEADS // 2, generator=generator)
    cos, sin = angles if rotary else (None, None)
    whole = attention.metadata([rows - 8, 8], rows, 3)
    windows = attention.metadata([8] * (rows // 8), rows, rows // 8)
    values = whole | {WINDOW + name: value for name, value in windows.items()}
    expected, expected_taps = plain(x.clone(), cos, sin, values)
    found, found_taps = compiled(x.clone(), cos, sin, values)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found_taps, expected_taps, rtol=1e-4, atol=1e-4)
