"""Products of few rows on compute capability 9.0: few_rows.cu, compiled at run time for each tile.

Between small kernels the gaps cost as much as the products. These begin before the kernel in front
of them has ended, as those of cuBLASLt do not. Knows shapes and tiles, not who asks for them.
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

from actors.kernels import nvrtc
from actors.kernels.cublaslt import Ending, Shape
from actors.kernels.hopper import ARCHITECTURE, CAPABILITY, TYPES, product
from actors.kernels.native import FEW_ROWS
from actors.kernels.tensor_map import tensor_map

MOST_WEIGHTS = 8 * 1024**2
"""Products of more, as mergers are, wait for their weights, whatever the kernel."""
TILE_ROWS = (32, 48, 56, 64, 72, 88, 104, 128, 144, 176, 208)
"""Not every multiple of 8, so that budgets share kernels: compiling takes tenths of a second."""
MOST_SUMS = 64 * 416
"""Of a tile: what fits into the registers."""
PROCESSORS = {1: 132, 2: 132, 3: 117, 4: 120}
"""Blocks that run at once on an H200, by splits: a cluster lies within one part of it."""
ENDINGS: dict[Ending, int] = {"bias": 0, "gelu_tanh": 1, "add": 2}
COLUMNS = 64
"""Of x and weight in a stage of the ring: 128 bytes."""
SHARED_BYTES = 226 * 1024
ALIGNMENT_BYTES = 1024
FEWEST_STAGES = 3
MEASURED_TILES = 3
UNIT = 8
"""Rows, columns and the distances of rows come in so many: 16 bytes."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tile:
    """64 x groups features and so many rows of a product; `splits` blocks share out its sums."""

    groups: int
    rows: int
    splits: int
    ending: Ending

    @property
    def share(self) -> int:
        """Rows that one block ends."""
        return -(-self.rows // UNIT // self.splits) * UNIT

    @property
    def added_bytes(self) -> int:
        """Of what is added to."""
        return self.share * self.groups * 128 if self.ending == "add" else 0

    @property
    def stage_bytes(self) -> int:
        """Of weights and x."""
        return (64 * self.groups + self.rows) * 2 * COLUMNS

    @property
    def stages(self) -> int:
        """As many as fit."""
        return (SHARED_BYTES - ALIGNMENT_BYTES - self.added_bytes) // self.stage_bytes

    @property
    def threads(self) -> int:
        """Of one block: those that compute, and the warp that copies."""
        return 128 * self.groups + 32

    def blocks(self, rows: int, n: int) -> tuple[int, int, int]:
        """Of a launch."""
        return -(-n // (64 * self.groups)), -(-rows // self.rows), self.splits

    def cost(self, shape: Shape) -> float:
        """About a processor's cycles, as fitted to what one H200 measured."""
        wide, high, _ = self.blocks(shape.rows, shape.n)
        rounds = -(-wide * high * self.splits // PROCESSORS[self.splits])
        # Of 16 columns: the matrix unit takes half a cycle a row, and each step 80 at least.
        sums = self.groups * self.rows
        step = max(80, sums / 2 + 12 * (self.groups - 1))
        steps = 4 * -(-shape.k // (COLUMNS * self.splits))
        each = {"bias": 3, "gelu_tanh": 5, "add": 11}[self.ending]
        end = 2000 + 19 * sums if self.splits > 1 else each * sums
        return rounds * (steps * step + end + 7 * self.share + 800 * self.groups + 3400)


@dataclass(frozen=True, slots=True)
class FewRows:
    """How products of one shape are computed."""

    tile: Tile
    kernel: nvrtc.Kernel

    def run(self, weight: Tensor, bias: Tensor | None, x: Tensor, out: Tensor) -> None:
        """Enqueues one product on the current stream."""
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


def few_rows(shape: Shape, ending: Ending, device: torch.device) -> list[FewRows]:
    """The ways that should be fastest, of different forms of tile, worth a measurement."""
    units = (shape.n, shape.k, shape.x_stride, shape.out_stride)
    if shape.rows > FEW_ROWS or shape.n * shape.k > MOST_WEIGHTS or shape.dtype not in TYPES:
        return []
    if any(each % UNIT for each in units) or device.type != "cuda":
        return []
    if torch.cuda.get_device_capability(device) != CAPABILITY:
        return []
    chosen = best(shape, ending)
    try:
        with ThreadPoolExecutor(
            MEASURED_TILES
        ) as pool:  # each compiles for some tenths of a second
            list(pool.map(partial(image, TYPES[shape.dtype]), chosen))
        with torch.cuda.device(device):
            return [FewRows(tile, kernel_for(device, shape.dtype, tile)) for tile in chosen]
    except (OSError, RuntimeError) as error:
        warn(str(error))
        return []


def best(shape: Shape, ending: Ending) -> list[Tile]:
    """The cheapest tiles, of each number of groups and splits two at most."""
    forms, chosen = Counter[tuple[int, int]](), []
    for tile in sorted(tiles(shape, ending), key=lambda tile: tile.cost(shape)):
        forms[tile.groups, tile.splits] += 1
        if forms[tile.groups, tile.splits] <= 2:
            chosen.append(tile)
    return chosen[:MEASURED_TILES]


def tiles(shape: Shape, ending: Ending) -> Iterator[Tile]:
    """Those that fit into a processor. Only sums that are added to something can be split."""
    most_splits = 4 if ending == "add" else 1
    for groups in (1, 2, 3):
        for rows in TILE_ROWS:
            for splits in range(1, most_splits + 1):
                tile = Tile(groups, rows, splits, ending)
                fits = 64 * groups * rows <= MOST_SUMS and tile.stages >= FEWEST_STAGES
                if fits and shape.k >= COLUMNS * splits:
                    yield tile


@cache
def kernel_for(device: torch.device, dtype: torch.dtype, tile: Tile) -> nvrtc.Kernel:
    """On this device, which must be the current one. OSError or RuntimeError: see nvrtc.build."""
    assert device.index == torch.cuda.current_device(), "This is a bug."
    memory = ALIGNMENT_BYTES + tile.stages * tile.stage_bytes + tile.added_bytes
    return nvrtc.load(image(TYPES[dtype], tile), "multiply_few", tile.threads, memory)


@cache
def image(element: str, tile: Tile) -> bytes:
    """The machine code."""
    return nvrtc.compiled(source(element, tile), ARCHITECTURE)


@cache
def warn(error: str) -> None:
    """Once in this process, whatever the number of shapes."""
    log.warning("products of few rows by cuBLASLt: few_rows.cu cannot be used: %s", error)


def source(element: str, tile: Tile) -> str:
    """All that is compiled, as one text."""
    defined = {
        "ELEMENT": "unsigned short",
        "TYPE": f'"{element}"',
        "GROUPS": tile.groups,
        "ROWS": tile.rows,
        "SPLITS": tile.splits,
        "STAGES": tile.stages,
        "ENDING": ENDINGS[tile.ending],
    }
    folder = Path(__file__).parent
    return "\n".join(
        [
            *(f"#define {name} {value}" for name, value in defined.items()),
            (folder / "hopper_ptx.cu").read_text(),
            product("multiply", element, tile.rows, shared=True),
            (folder / "few_rows.cu").read_text(),
        ]
    )
