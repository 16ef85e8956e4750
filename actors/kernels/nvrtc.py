"""CUDA C++ compiled and launched at run time: NVRTC and the driver, both through ctypes.

Knows no kernel. NVRTC comes with torch, so that no CUDA toolkit is needed.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_uint, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.kernels.native import check, shared_object

MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""
PROGRAMMATIC_STREAM_SERIALIZATION = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION."""

Argument = Tensor | int | bytes


class Attribute(ctypes.Structure):
    """CUlaunchAttribute, of those whose value is a number."""

    _fields_ = [("id", c_int), ("padding", c_int), ("value", c_int * 16)]


class Launch(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("attributes_count", c_uint),
    ]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One function on the device that was current when it was loaded.

    It may begin before the kernel in front of it has ended, so that no gap is between them, also in
    a CUDA graph: before it reads what others write, and before it writes, it must wait for that one
    (`depend_wait` of hopper_ptx.cu).
    """

    function: ctypes.c_void_p
    threads: int
    shared_bytes: int

    def launch(self, blocks: tuple[int, int, int], *arguments: Argument) -> None:
        """Enqueues so many blocks on the current stream.

        Of tensors the kernel gets the address of their data; integers have 32 bits; bytes are
        structures, passed by value.
        """
        values = [passed(argument) for argument in arguments]
        addresses = (c_void_p * len(values))(*map(ctypes.addressof, values))
        overlapping = Attribute(PROGRAMMATIC_STREAM_SERIALIZATION)
        overlapping.value[0] = 1
        launch = Launch(blocks, (self.threads, 1, 1), self.shared_bytes)
        launch.stream = torch.cuda.current_stream().cuda_stream
        launch.attributes, launch.attributes_count = ctypes.pointer(overlapping), 1
        driver = ctypes.CDLL("libcuda.so.1")
        check(
            "cuLaunchKernelEx",
            driver.cuLaunchKernelEx(ctypes.byref(launch), self.function, addresses, None),
        )


def passed(argument: Argument) -> ctypes.c_void_p | ctypes.c_int | ctypes.Array[ctypes.c_char]:
    """What the driver reads of an argument."""
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, int):
        return ctypes.c_int(argument)
    return ctypes.create_string_buffer(argument, len(argument))


def build(source: str, name: str, architecture: str, threads: int, shared_bytes: int) -> Kernel:
    """Compiles `source` for e.g. "sm_90a" and loads its extern "C" function `name`.

    RuntimeError, with the compiler's messages, if it does not compile or load; OSError if this
    torch brings no NVRTC.
    """
    return load(compiled(source, architecture), name, threads, shared_bytes)


def load(image: bytes, name: str, threads: int, shared_bytes: int) -> Kernel:
    """The function `name` of machine code, on the current device. RuntimeError if it has none."""
    torch.cuda.current_stream()  # the driver needs a context
    driver = ctypes.CDLL("libcuda.so.1")
    module, function = c_void_p(), c_void_p()
    check("cuModuleLoadData", driver.cuModuleLoadData(ctypes.byref(module), image))
    check(
        "cuModuleGetFunction",
        driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()),
    )
    check(
        "cuFuncSetAttribute",
        driver.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes),
    )
    return Kernel(function, threads, shared_bytes)


def compiled(source: str, architecture: str) -> bytes:
    """The machine code of `source`. Needs no device."""
    compiler = shared_object("nvrtc")
    program = ctypes.c_void_p()
    check(
        "nvrtcCreateProgram",
        compiler.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None
        ),
    )
    options = (ctypes.c_char_p * 2)(f"--gpu-architecture={architecture}".encode(), b"--std=c++17")
    try:
        if compiler.nvrtcCompileProgram(program, len(options), options):
            raise RuntimeError(f"nvrtcCompileProgram: {read(compiler, program, 'ProgramLog')!r}")
        return read(compiler, program, "CUBIN")
    finally:
        compiler.nvrtcDestroyProgram(ctypes.byref(program))


def read(compiler: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    """One of the compiler's results."""
    size = ctypes.c_size_t()
    check(f"nvrtcGet{what}Size", compiler[f"nvrtcGet{what}Size"](program, ctypes.byref(size)))
    result = ctypes.create_string_buffer(size.value)
    check(f"nvrtcGet{what}", compiler[f"nvrtcGet{what}"](program, result))
    return result.raw
