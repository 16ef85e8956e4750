"""CUDA C++ for compute capability 9.0, compiled by NVRTC and launched through the CUDA driver.

Both are called through `cuda.bindings`. torch's CUDA wheels depend on it and on NVRTC, so no CUDA
toolkit is needed. Functions import it when they need it, because machines without CUDA lack it.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actors.kernels import checked

ARCHITECTURE = "sm_90a"
CAPABILITY = (9, 0)

ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "f16"}  # their names in PTX

OVERLAPPED_ROWS = 640
"""Up to this many rows, kernels are so short on an H200 that the gaps between them matter
(BENCHMARKS.md)."""

TENSOR_MAP_BYTES = 128

Argument = Tensor | int | bytes


log = logging.getLogger(__name__)


@cache
def runs_on(capability: tuple[int, int]) -> bool:
    """Whether our CUDA C++ kernels run on this compute capability. Logs once if they do not.

    They run on 9.0 only, because they use wgmma, which neither older nor newer chips have.
    """
    if capability != CAPABILITY:
        log.info(
            "compute capability %d.%d: attention by Triton, GEMMs by cuBLASLt, because our CUDA "
            "C++ kernels are for 9.0 only",
            *capability,
        )
    return capability == CAPABILITY


@cache
def overlaps(device: torch.device, rows: int) -> bool:
    """Whether a kernel over this many rows starts before the previous one has finished, by
    programmatic dependent launch: see LoadedKernel."""
    return rows <= OVERLAPPED_ROWS and torch.cuda.get_device_capability(device) >= CAPABILITY


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """A kernel in the CUDA context that was current when it was loaded.

    Always launched with programmatic dependent launch, so it must wait for the previous kernel
    (`depend_wait` in ptx.cu) before it reads what that one writes, and before it writes.
    """

    function: Any  # CUfunction
    threads: int  # per block
    shared_bytes: int

    def launch(self, blocks: tuple[int, int, int], *arguments: Argument) -> None:
        """Enqueues a grid of blocks on the current stream.

        Tensors are passed as the address of their data, integers as 32 bits, and bytes as
        structures by value. Raises RuntimeError if CUDA rejects the launch.
        """
        from cuda.bindings import driver

        overlapping = driver.CUlaunchAttributeValue()
        overlapping.programmaticStreamSerializationAllowed = 1
        attribute, kinds = driver.CUlaunchAttribute(), driver.CUlaunchAttributeID
        attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value = overlapping
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = blocks
        config.blockDimX, config.blockDimY, config.blockDimZ = self.threads, 1, 1
        config.sharedMemBytes = self.shared_bytes
        config.hStream = torch.cuda.current_stream().cuda_stream
        config.attrs, config.numAttrs = [attribute], 1
        values = [passed(argument) for argument in arguments]
        addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        checked(driver.cuLaunchKernelEx(config, self.function, ctypes.addressof(addresses), 0))


def passed(argument: Argument) -> ctypes.c_void_p | ctypes.c_int | ctypes.Array[ctypes.c_char]:
    """The argument in host memory, as the driver reads it."""
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, int):
        return ctypes.c_int(argument)
    return ctypes.create_string_buffer(argument, len(argument))


def load(image: bytes, name: str, threads: int, shared_bytes: int) -> LoadedKernel:
    """Loads the extern "C" kernel `name` of a cubin on the current device. Raises RuntimeError if
    it does not load, ImportError without cuda.bindings."""
    from cuda.bindings import driver

    torch.cuda.current_stream()  # initialises CUDA: the driver needs a context
    (module,) = checked(driver.cuModuleLoadData(image))
    (function,) = checked(driver.cuModuleGetFunction(module, name.encode()))
    largest = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    checked(driver.cuFuncSetAttribute(function, largest, shared_bytes))
    return LoadedKernel(function, threads, shared_bytes)


def compiled(source: str) -> bytes:
    """Compiles `source` to a cubin. Needs no device. Raises RuntimeError, with the compiler's
    messages, if it does not compile, ImportError without cuda.bindings."""
    from cuda.bindings import nvrtc

    (program,) = checked(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], []))
    options = [f"--gpu-architecture={ARCHITECTURE}".encode(), b"--std=c++17"]
    try:
        (code,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            (size,) = checked(nvrtc.nvrtcGetProgramLogSize(program))
            messages = bytes(size)
            checked(nvrtc.nvrtcGetProgramLog(program, messages))
            raise RuntimeError(f"NVRTC: {messages!r}")
        (size,) = checked(nvrtc.nvrtcGetCUBINSize(program))
        cubin = bytes(size)
        checked(nvrtc.nvrtcGetCUBIN(program, cubin))
        return cubin
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def tensor_map(matrix: Tensor, box: tuple[int, int], row_bytes: int = 128) -> bytes:
    """The CUtensorMap with which TMA copies boxes of (rows, columns) of a matrix [rows, columns].

    Values have 16 bits. Each row is contiguous, but rows need not be adjacent. A box is at most 64
    columns wide and is stored in shared memory as rows of `row_bytes`, swizzled. Values beyond the
    matrix arrive as zeros.
    """
    rows, columns = matrix.shape
    steps = (matrix.stride(0) * matrix.itemsize,)
    return encoded_map(
        matrix.data_ptr(), matrix.dtype, (columns, rows), steps, (box[1], box[0]), row_bytes
    )


@lru_cache(maxsize=4096)
def encoded_map(
    pointer: int,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    steps: tuple[int, ...],
    box: tuple[int, ...],
    row_bytes: int,
) -> bytes:
    """Like tensor_map, for any number of dimensions, the contiguous one first. `steps`: the strides
    of the other dimensions in bytes; dimensions may overlap.

    Cached, because eager calls of a tower ask for the same maps every time.
    """
    from cuda.bindings import driver

    kinds, swizzles = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
    kind = {
        torch.float16: kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        torch.bfloat16: kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        torch.uint8: kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8,
    }[dtype]
    swizzle = {
        128: swizzles.CU_TENSOR_MAP_SWIZZLE_128B,
        64: swizzles.CU_TENSOR_MAP_SWIZZLE_64B,
        32: swizzles.CU_TENSOR_MAP_SWIZZLE_32B,
        16: swizzles.CU_TENSOR_MAP_SWIZZLE_NONE,
    }[row_bytes]
    (found,) = checked(
        driver.cuTensorMapEncodeTiled(
            kind,
            len(sizes),
            pointer,
            [driver.cuuint64_t(size) for size in sizes],
            [driver.cuuint64_t(step) for step in steps],
            [driver.cuuint32_t(size) for size in box],
            [driver.cuuint32_t(1)] * len(sizes),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return ctypes.string_at(int(found.getPtr()), TENSOR_MAP_BYTES)


def source(element: str, defined: Mapping[str, object], *parts: Path | str) -> str:
    """The text to compile: `#define`s, ptx.cu, then the parts, which are files or code."""
    every = {"ELEMENT": "unsigned short", "TYPE": f'"{element}"', **defined}
    texts = [part if isinstance(part, str) else part.read_text() for part in parts]
    defines = [f"#define {name} {value}" for name, value in every.items()]
    return "\n".join([*defines, (Path(__file__).parent / "ptx.cu").read_text(), *texts])


def wgmma(
    name: str, element: str, columns: int, *, shared: bool = False, transposed: bool = False
) -> str:
    """Generates a CUDA function: d [64, columns] (+)= a [64, depth] in registers x b [depth,
    columns] in shared memory. The depth is 16, or 32 in e4m3.

    It is generated because the instruction names each of its columns / 2 registers per thread.
    `shared`: a is in shared memory as well. `transposed`: b is transposed. If a is in registers, b
    is the low word of its descriptor, and the template argument HIGH is the high word.
    """
    count = columns // 2
    a = ["a"] if shared else ["a0", "a1", "a2", "a3"]
    outputs = ", ".join(f"%{i}" for i in range(count))
    first = f"%{count}" if shared else "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}"
    b, add = count + len(a), count + len(a) + 1
    flags = f"1, 1, 0, {int(transposed)}" if shared else f"1, 1, {int(transposed)}"
    depth = 16
    if element == "e4m3":
        flags, depth = "1, 1", 32
    bound = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    read = ", ".join(f'"{"l" if shared else "r"}"({each})' for each in a)
    declared = ", ".join(f"{'u64' if shared else 'u32'} {each}" for each in a)
    head, kind, at = "", "u64", f"%{b}"
    join, passed = "", '"l"(b), "r"(add)'
    if not shared:
        head, kind, at = "template <u32 HIGH>\n", "u32", "b"
        join = f".reg .b64 b;\\nmov.b64 b, {{%{b}, %{add + 1}}};\\n"
        passed = '"r"(b), "r"(add), "n"(HIGH)'
    return f"""
{head}DEVICE void {name}(float (&d)[{count}], {declared}, {kind} b, int add) {{
    asm volatile(
        "{{\\n.reg .pred add;\\nsetp.ne.b32 add, %{add}, 0;\\n{join}"
        "wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.f32.{element}.{element} {{{outputs}}}, "
        "{first}, {at}, add, {flags};\\n}}"
        : {bound} : {read}, {passed});
}}
"""
