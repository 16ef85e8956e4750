"""The weights of a resize in integers, against torch's own uint8 kernel, bit for bit."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.media.patchify import resize
from actors.media.resample import Resample, Taps, taps
from actors.types import Bytes, Size


def resampled(pixels: Bytes, weights: Taps) -> Bytes:
    """The first axis of pixels, as the docstring of Taps says it."""
    places = weights.first[:, None] + np.arange(weights.weights.shape[1])
    inside = np.minimum(places, len(pixels) - 1)  # the weights beyond are zero
    total = np.einsum("jk,jk...->j...", weights.weights, pixels[inside].astype(np.int32))
    pixels = (total + (1 << weights.bits >> 1)) >> weights.bits
    return pixels.clip(0, 255).astype(np.uint8)


def in_two_passes(pixels: Bytes, size: Size, resample: Resample) -> Bytes:
    """uint8 [height, width, 3]: the width first, each pass rounded to uint8."""
    height, width, _ = pixels.shape
    if width != size.width:
        across = resampled(pixels.swapaxes(0, 1), taps(width, size.width, resample))
        pixels = across.swapaxes(0, 1)
    if height != size.height:
        pixels = resampled(pixels, taps(height, size.height, resample))
    return pixels


@pytest.mark.parametrize("resample", get_args(Resample))
@settings(max_examples=60)
@given(
    source=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    target=st.tuples(st.integers(1, 200), st.integers(1, 200)),
    seed=st.integers(0, 2**16),
    hard=st.booleans(),
)
def test_pixels_are_torchs(
    resample: Resample, source: tuple[int, int], target: tuple[int, int], seed: int, hard: bool
) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (*source, 3), np.uint8)
    if hard:  # edges that overshoot: what is below 0 or above 255 is cut off between the passes
        pixels = np.where(pixels > 127, np.uint8(255), np.uint8(0))
    size = Size(width=target[1], height=target[0])
    exact = resize(torch.from_numpy(pixels).permute(2, 0, 1), size, resample)
    ours = in_two_passes(pixels, size, resample)
    assert np.array_equal(ours, exact.permute(1, 2, 0).numpy())


@pytest.mark.parametrize(("source", "target"), [(1080, 1088), (4032, 1344), (336, 320), (1, 28)])
def test_weights_sum_to_one_and_fit_16_bits(source: int, target: int) -> None:
    found = taps(source, target, "bicubic")
    assert np.abs(found.weights).max() < 1 << 15
    assert np.abs(found.weights.sum(1) - (1 << found.bits)).max() <= found.weights.shape[1]
    assert found.weights.dtype == found.first.dtype == np.int32
