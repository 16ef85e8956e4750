"""GEMMs with few rows on compute capability 9.0: skinny_gemm.cu, compiled for each tile shape.

With few rows the gaps between kernels cost as much as the GEMMs themselves. Unlike cuBLASLt's
kernels, these start before the previous kernel has finished.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from actors.kernels.gemm.cublaslt import Epilogue, GemmShape
from actors.kernels.gemm.fp8 import Matrix, Weight, values
from actors.kernels.hopper import cuda
from actors.kernels.hopper.cuda import (
    ELEMENTS,
    OVERLAPPED_ROWS,
    LoadedKernel,
    tensor_map,
)

MOST_WEIGHTS = 8 * 1024**2  # larger GEMMs, such as mergers', are bound by reading the weights
TILE_ROWS = (32, 48, 56, 64, 72, 88, 104, 128, 144, 176, 208)
"""Not every multiple of 8, so that budgets share kernels: each takes 0.1 s or more to compile."""
MOST_SUMS = 64 * 416  # accumulators of a tile that fit into the registers
CONCURRENT_BLOCKS = {1: 132, 2: 132, 3: 117, 4: 120}
"""Blocks that run at once on an H200, by splits, because a cluster must fit into one GPC."""
EPILOGUES: dict[Epilogue, int] = {"bias": 0, "gelu_tanh": 1, "add": 2}
COLUMNS = 64  # columns of x and of the weight in a stage of the ring: 128 bytes
SHARED_BYTES = 226 * 1024
ALIGNMENT_BYTES = 1024
FEWEST_STAGES = 3
MEASURED_TILES = 3
UNIT = 8  # rows, columns and strides are multiples of this: 16 bytes

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GemmTile:
    """A tile of the output, 64 x groups features by `rows` rows. `splits` blocks divide k."""

    groups: int
    rows: int
    splits: int
    epilogue: Epilogue

    @property
    def share(self) -> int:
        """Rows that one block finishes."""
        return -(-self.rows // UNIT // self.splits) * UNIT

    @property
    def added_bytes(self) -> int:
        """Shared memory for the output to which the result is added."""
        return self.share * self.groups * 128 if self.epilogue == "add" else 0

    @property
    def stage_bytes(self) -> int:
        return (64 * self.groups + self.rows) * 2 * COLUMNS

    @property
    def stages(self) -> int:
        return (SHARED_BYTES - ALIGNMENT_BYTES - self.added_bytes) // self.stage_bytes

    def blocks(self, rows: int, n: int) -> tuple[int, int, int]:
        return -(-n // (64 * self.groups)), -(-rows // self.rows), self.splits

    def cost(self, shape: GemmShape) -> float:
        """Roughly the cycles of an SM, fitted to measurements on an H200."""
        wide, high, _ = self.blocks(shape.rows, shape.n)
        rounds = -(-wide * high * self.splits // CONCURRENT_BLOCKS[self.splits])
        # A step is 16 columns: tensor cores take half a cycle per row, and at least 80 cycles.
        sums = self.groups * self.rows
        step = max(80, sums / 2 + 12 * (self.groups - 1))
        steps = 4 * -(-shape.k // (COLUMNS * self.splits))
        each = {"bias": 3, "gelu_tanh": 5, "add": 11}[self.epilogue]
        end = 2000 + 19 * sums if self.splits > 1 else each * sums
        return rounds * (steps * step + end + 7 * self.share + 800 * self.groups + 3400)


@dataclass(frozen=True, slots=True)
class SkinnyGemm:
    tile: GemmTile
    kernel: LoadedKernel

    def run(self, weight: Weight, bias: Tensor | None, x: Matrix, out: Matrix) -> None:
        weight, x, out = values(weight), values(x), values(out)
        assert x.dtype != torch.float8_e4m3fn, "This is a bug."
        boxes = (x, self.tile.rows), (weight, 64 * self.tile.groups), (out, UNIT)
        maps = b"".join(tensor_map(matrix, (rows, COLUMNS)) for matrix, rows in boxes)
        n, k = weight.shape
        self.kernel.launch(
            self.tile.blocks(len(x), n),
            maps,
            weight if bias is None else bias,
            -(-k // COLUMNS),
            n,
        )


def skinny_gemms(shape: GemmShape, epilogue: Epilogue, device: torch.device) -> list[SkinnyGemm]:
    """The kernels that should be fastest for a shape, to be timed; none if it is unsupported."""
    units = (shape.n, shape.k, shape.x_stride, shape.out_stride)
    small = shape.rows <= OVERLAPPED_ROWS and shape.n * shape.k <= MOST_WEIGHTS
    if not small or shape.dtype not in ELEMENTS or any(each % UNIT for each in units):
        return []
    if device.type != "cuda" or not cuda.runs_on(torch.cuda.get_device_capability(device)):
        return []
    chosen = best(shape, epilogue)
    try:
        with ThreadPoolExecutor(MEASURED_TILES) as pool:  # compiling takes tenths of a second
            list(pool.map(partial(image, ELEMENTS[shape.dtype]), chosen))
        with torch.cuda.device(device):
            return [SkinnyGemm(tile, kernel_for(device, shape.dtype, tile)) for tile in chosen]
    except (ImportError, OSError, RuntimeError) as error:
        warn(str(error))
        return []


def best(shape: GemmShape, epilogue: Epilogue) -> list[GemmTile]:
    """The cheapest tiles, at most two of each number of groups and splits."""
    forms, chosen = Counter[tuple[int, int]](), []
    for tile in sorted(tiles(shape, epilogue), key=lambda tile: tile.cost(shape)):
        forms[tile.groups, tile.splits] += 1
        if forms[tile.groups, tile.splits] <= 2:
            chosen.append(tile)
    return chosen[:MEASURED_TILES]


def tiles(shape: GemmShape, epilogue: Epilogue) -> Iterator[GemmTile]:
    """All tiles that fit into an SM. k can be split only with the epilogue "add"."""
    most_splits = 4 if epilogue == "add" else 1
    for groups in (1, 2, 3):
        for rows in TILE_ROWS:
            for splits in range(1, most_splits + 1):
                tile = GemmTile(groups, rows, splits, epilogue)
                fits = 64 * groups * rows <= MOST_SUMS and tile.stages >= FEWEST_STAGES
                if fits and shape.k >= COLUMNS * splits:
                    yield tile


@cache
def kernel_for(device: torch.device, dtype: torch.dtype, tile: GemmTile) -> LoadedKernel:
    """The loaded kernel. The device must be the current one. Raises what cuda.compiled and
    cuda.load raise."""
    assert device.index == torch.cuda.current_device(), "This is a bug."
    memory = ALIGNMENT_BYTES + tile.stages * tile.stage_bytes + tile.added_bytes
    threads = 128 * tile.groups + 32  # the consumer warpgroups and the producer warp
    return cuda.load(image(ELEMENTS[dtype], tile), "multiply_few", threads, memory)


@cache
def image(element: str, tile: GemmTile) -> bytes:
    return cuda.compiled(source(element, tile))


@cache
def warn(error: str) -> None:
    """Once per process, however many shapes there are."""
    log.warning("skinny GEMMs use cuBLASLt: skinny_gemm.cu is not available: %s", error)


def source(element: str, tile: GemmTile) -> str:
    defined = {
        "GROUPS": tile.groups,
        "ROWS": tile.rows,
        "SPLITS": tile.splits,
        "STAGES": tile.stages,
        "EPILOGUE": EPILOGUES[tile.epilogue],
    }
    multiply = cuda.wgmma("multiply", element, tile.rows, shared=True)
    return cuda.source(element, defined, multiply, Path(__file__).parent / "skinny_gemm.cu")
