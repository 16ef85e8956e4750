"""Every Triton kernel is compiled for every supported chip, and fits it. Needs no GPU.

The kernels' own functions launch them, with everything that decides about a launch but the device.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch

import actors
from actors.families.deepseek_ocr.sam import FastSquareAttention, SquareAttention
from actors.kernels.attention import HEAD_SIZES, LONG_PATCHES, SegmentAttention, TritonAttention

if sys.platform != "linux":
    pytest.skip("Triton has wheels for Linux only", allow_module_level=True)

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from actors.kernels import GATED
from actors.kernels.gemm import fp8
from actors.kernels.hopper.cuda import overlaps
from actors.kernels.triton import attention_kernel
from actors.kernels.triton.elementwise import (
    activated,
    add_positions_,
    norm,
    rotate_,
    shifted,
)
from actors.models.layers.block import Activation

Chip = tuple[int, int]
Launched = Callable[[Chip], list[Any]]

SHARED_KIB = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
"""Shared memory that a block may have, by compute capability: CUDA C++ Programming Guide."""
BLOCK_REGISTERS = 64 * 1024
SPILLED_BYTES = 200
"""What a thread may spill: as much as attention on 9.0, which is tuned, at head size 128."""
SLOW = pytest.mark.slow  # minutes in all
CHIPS = pytest.mark.parametrize("chip", SHARED_KIB, ids=lambda chip: "{}.{}".format(*chip))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Launched]:
    """Makes launches compile for a chip; returns the list of what was compiled. With the parameter
    `names`, nothing is compiled, and the list has the names of the kernels."""
    kernels: list[Any] = []
    run = JITFunction.run
    names = getattr(request, "param", None) == "names"

    def compiled(self: Any, *args: object, grid: object, warmup: bool, **named: object) -> None:
        kernel = self.__name__ if names else run(self, *args, grid=grid, warmup=True, **named)
        kernels.append(kernel)

    def on(chip: Chip) -> list[Any]:
        number = 10 * chip[0] + chip[1]
        active = SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", number, 32),
            get_current_device=lambda: number,  # Triton keeps kernels by device
            get_current_stream=lambda _: 0,
        )
        monkeypatch.setattr(driver, "_active", active)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: chip)
        # No kernels in CUDA C++, also where there is a GPU: the tensors are on the CPU.
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        return kernels

    monkeypatch.setattr(JITFunction, "run", compiled)
    overlaps.cache_clear()
    yield on
    overlaps.cache_clear()


def check(kernel: Any, chip: Chip, folder: Path) -> None:
    """Its shared memory and registers are within the chip's limits."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.kernel)
    command = [knobs.nvidia.cuobjdump.path, "-res-usage", cubin]
    usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    registers, spilled = map(int, found.groups())
    metadata = kernel.metadata
    told = f"{metadata.name}: {metadata.shared} bytes shared, {usage}"
    assert metadata.target.arch == 10 * chip[0] + chip[1]
    assert metadata.shared <= SHARED_KIB[chip] * 1024, told
    assert registers * 32 * metadata.num_warps <= BLOCK_REGISTERS, told
    assert spilled <= SPILLED_BYTES, told


def bf16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def attend(size: int, patches: int, dtype: torch.dtype = torch.bfloat16) -> None:
    attention = TritonAttention()
    values = attention.metadata([patches], patches, 1)
    attention(torch.empty(patches, 3, 16, size, dtype=dtype), values)


def between_gemms(rows: int) -> None:
    for width in (1152, 12800):  # a tower's, and the widest of a merger
        x, by = bf16(rows, width), bf16(width)
        norm(x, torch.empty(width), by, by, 1e-6, centred=True)
    x = bf16(rows, 3200)  # the widest tower
    shifted(x, torch.empty(3200), x)
    table, taps = bf16(48**2, 3200), torch.empty(rows, 16)
    add_positions_(x, table, taps.int(), taps)
    half = torch.empty(rows, 36)
    rotate_(bf16(rows, 3, 16, 72), half, half)
    for activation in get_args(Activation):
        activated(bf16(rows, 2 * 4096), activation)


def quantise(rows: int) -> None:
    scale = torch.empty(1)
    for width in (1152, 4608):  # a tower's, and a merger's
        x, by = bf16(rows, width), bf16(width)
        norm(x, torch.empty(width), by, by, 1e-6, centred=True, scales=scale)
    for activation in get_args(Activation):
        columns = torch.empty(2176) if activation in GATED else scale
        activated(bf16(rows, 4352), activation, columns)


def attend_in_squares(window: int) -> None:
    side = max(window, 40)  # 14 does not divide it
    FastSquareAttention(side, bf16(2, window, window, 64))(bf16(side**2, 3, 12, 64), {})


def jit_functions() -> dict[str, set[str]]:
    """The Triton kernels in actors/ and their helpers, with the names of what each calls."""
    found: dict[str, set[str]] = {}
    for path in Path(actors.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and any(map(is_jit, node.decorator_list)):
                assert node.name not in found, f"two Triton functions have the name {node.name}"
                calls = [one.func for one in ast.walk(node) if isinstance(one, ast.Call)]
                found[node.name] = {last_name(call) for call in calls}
    return found


def is_jit(decorator: ast.expr) -> bool:
    return last_name(decorator.func if isinstance(decorator, ast.Call) else decorator) == "jit"


def last_name(path: ast.expr) -> str:
    return ast.unparse(path).rpartition(".")[2]


@pytest.mark.parametrize("launched", ["names"], indirect=True)
def test_every_kernel_is_compiled_here(launched: Launched) -> None:
    """By the tests below, which call the same functions, or as a helper of such a kernel."""
    for chip in SHARED_KIB:
        names = launched(chip)
        attend(72, LONG_PATCHES)
        between_gemms(400)
        attend_in_squares(64)
        if chip >= fp8.CAPABILITY:
            quantise(400)
    functions, reached = jit_functions(), set(names)
    assert reached <= functions.keys()
    waiting = list(reached)
    while waiting:
        helpers = functions[waiting.pop()] & functions.keys() - reached
        reached |= helpers
        waiting += helpers
    missed = sorted(functions.keys() - reached)
    assert not missed, f"no test of this file compiles {', '.join(missed)}"


def test_attention_fits_into_an_a10(launched: Launched, tmp_path: Path) -> None:
    kernels = launched((8, 6))
    attend(72, LONG_PATCHES)
    (kernel,) = kernels
    check(kernel, (8, 6), tmp_path)


@pytest.mark.extended
@pytest.mark.parametrize(
    "size", [pytest.param(size, marks=[] if size in (72, 128) else SLOW) for size in HEAD_SIZES]
)
@CHIPS
def test_attention_fits(chip: Chip, size: int, launched: Launched, tmp_path: Path) -> None:
    kernels = launched(chip)
    for patches in (LONG_PATCHES, 2 * LONG_PATCHES):  # both sizes of tiles
        attend(size, patches)
    if size == 72:
        attend(size, 2 * LONG_PATCHES, torch.float16)
    assert len(kernels) == (3 if size == 72 else 2)
    for kernel in kernels:
        check(kernel, chip, tmp_path)


@pytest.mark.extended
@pytest.mark.parametrize("rows", [400, 8192])  # up to 640 rows kernels overlap
@CHIPS
def test_what_runs_between_gemms_fits(
    chip: Chip, rows: int, launched: Launched, tmp_path: Path
) -> None:
    kernels = launched(chip)
    between_gemms(rows)
    assert len(kernels) == 11
    for kernel in kernels:
        check(kernel, chip, tmp_path)


@pytest.mark.extended
@pytest.mark.parametrize("rows", [400, 8192])
@pytest.mark.parametrize("chip", [chip for chip in SHARED_KIB if chip >= fp8.CAPABILITY])
def test_what_quantises_fits(chip: Chip, rows: int, launched: Launched, tmp_path: Path) -> None:
    kernels = launched(chip)
    quantise(rows)
    assert len(kernels) == 8
    for kernel in kernels:
        check(kernel, chip, tmp_path)


@pytest.mark.extended
@pytest.mark.parametrize("window", [64, 40, 14])
@CHIPS
def test_attention_in_squares_fits(
    chip: Chip, window: int, launched: Launched, tmp_path: Path
) -> None:
    kernels = launched(chip)
    attend_in_squares(window)
    assert len(kernels) == 2
    for kernel in kernels:
        check(kernel, chip, tmp_path)


def squares_on_the_cpu() -> None:
    """For a process with TRITON_INTERPRET=1: windows that are the view, divide it, or do not."""
    for side, window in [(24, 24), (16, 8), (16, 14), (20, 7)]:
        qkv = torch.randn(2 * side**2, 3, 2, 16, dtype=torch.float16)
        tables = 0.3 * torch.randn(2, window, window, 16, dtype=torch.float16)
        expected = SquareAttention(side, tables.float())(qkv.float(), {})
        out = FastSquareAttention(side, tables)(qkv.clone(), {})
        assert torch.allclose(out.float(), expected, atol=5e-3), (side, window)


def attention_on_the_cpu() -> None:
    """For a process with TRITON_INTERPRET=1: attention with and without TMA."""
    for chip, size in product([(8, 6), (9, 0), (12, 0)], [72, 88, 128]):
        with patch("torch.cuda.get_device_capability", lambda _, chip=chip: chip):
            lengths, tiles, plain = [100, 1, 64], TritonAttention(), SegmentAttention()
            qkv = torch.randn(200, 3, 2, size, dtype=torch.float16)
            qkv[165:] = float("nan")
            expected = plain(qkv[:165].float(), plain.metadata(lengths, 165, 3))
            out = tiles(qkv.clone(), tiles.metadata(lengths, 200, 3))[:165]
            assert torch.allclose(out.float(), expected, atol=2e-3), (chip, size)


@pytest.mark.extended
@pytest.mark.parametrize("run", [attention_on_the_cpu, squares_on_the_cpu])
def test_attention_is_right(run: Callable[[], None]) -> None:
    code = f"from {__name__} import {run.__name__} as run; run()"
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


@pytest.mark.parametrize("size", HEAD_SIZES)
@pytest.mark.parametrize("queries", [64, 128])
def test_hopper_keeps_the_tile_that_was_tuned(queries: int, size: int) -> None:
    assert attention_kernel.tile((9, 0), queries, size) == (64, 4)
    assert attention_kernel.tile((8, 6), queries, size) == (32 if size > 96 else 64, queries // 16)
