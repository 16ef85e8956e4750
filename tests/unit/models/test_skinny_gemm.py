"""Which tiles GEMMs with few rows are computed in. The kernel itself runs in tests/gpu."""

from __future__ import annotations

import pytest
import torch

from actors.kernels.gemm.cublaslt import Epilogue, GemmShape
from actors.kernels.gemm.skinny_gemm import SHARED_BYTES, best, source, tiles

SHAPES: list[tuple[int, int, Epilogue]] = [
    (3456, 1152, "bias"),
    (1152, 1152, "add"),
    (4352, 1152, "gelu_tanh"),
    (1152, 4352, "add"),
]
"""n, k and epilogue of a layer of Qwen3-VL-8B."""


def shape_of(rows: int, n: int, k: int) -> GemmShape:
    return GemmShape(rows, n, k, k, n, torch.bfloat16)


@pytest.mark.parametrize("rows", [64, 416, 640])
@pytest.mark.parametrize(("n", "k", "epilogue"), SHAPES, ids=str)
def test_tiles_fit_into_a_processor(rows: int, n: int, k: int, epilogue: Epilogue) -> None:
    shape = shape_of(rows, n, k)
    for tile in tiles(shape, epilogue):
        ring = tile.stages * tile.stage_bytes
        assert ring + tile.added_bytes <= SHARED_BYTES
        # Blocks that share out a sum exchange it where the ring was, in float32.
        assert tile.splits == 1 or 64 * tile.groups * tile.rows * 4 <= ring
        wide, high, splits = tile.blocks(rows, n)
        assert 64 * tile.groups * wide >= n
        assert tile.rows * high >= rows
        assert tile.share * splits >= tile.rows


def test_a_small_image_keeps_nearly_all_processors_busy_for_one_round() -> None:
    for n, k, epilogue in SHAPES:
        shape = shape_of(416, n, k)
        tile = best(shape, epilogue)[0]
        wide, high, splits = tile.blocks(416, n)
        assert 96 <= wide * high * splits <= 132


def test_sums_are_split_only_if_they_are_added_to_something() -> None:
    assert {tile.splits for tile in tiles(shape_of(416, 1152, 4352), "add")} == {1, 2, 3, 4}
    assert {tile.splits for tile in tiles(shape_of(416, 1152, 4352), "bias")} == {1}


def test_a_tiny_model_has_no_tiles() -> None:
    assert best(shape_of(416, 96, 32), "bias") == []


def test_a_tile_is_written_out_whole() -> None:
    tile = next(tiles(shape_of(416, 1152, 1152), "add"))
    text = source("bf16", tile)
    assert f"#define ROWS {tile.rows}" in text
    assert f"m64n{tile.rows}k16.f32.bf16.bf16" in text
