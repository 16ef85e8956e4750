"""Tensor maps: what the copy engine of compute capability 9.0 is told of a matrix in memory."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from actors.kernels.native import check

BYTES, ALIGNMENT = 128, 64
"""Of a CUtensorMap."""
TYPES = {torch.float16: 6, torch.bfloat16: 9}
"""CU_TENSOR_MAP_DATA_TYPE_*."""
SWIZZLES = {128: 3, 32: 1, 16: 0}
"""CU_TENSOR_MAP_SWIZZLE_* of rows of so many bytes; those of 16 lie plain."""
L2_PROMOTION_256B = 3
"""CU_TENSOR_MAP_*."""


def tensor_map(matrix: Tensor, box: tuple[int, int], row_bytes: int = 128) -> bytes:
    """The map by which boxes of (rows, columns) of a 16-bit matrix [rows, columns] are copied.

    Rows of the matrix may lie apart.

    A box comes as rows of so many bytes in shared memory, swizzled, whatever its columns, 64 at
    most; what lies beyond the matrix comes as zeros.
    """
    rows, columns = matrix.shape
    kind, swizzle = TYPES[matrix.dtype], SWIZZLES[row_bytes]
    return encoded(matrix.data_ptr(), kind, rows, columns, matrix.stride(0), box, swizzle)


@lru_cache(maxsize=4096)
def encoded(
    pointer: int,
    kind: int,
    rows: int,
    columns: int,
    stride: int,
    box: tuple[int, int],
    swizzle: int,
) -> bytes:
    """See tensor_map. Kept, since a tower outside a graph asks for the same ones each call."""
    raw = ctypes.create_string_buffer(BYTES + ALIGNMENT)
    offset = -ctypes.addressof(raw) % ALIGNMENT
    height, width = box
    check(
        "cuTensorMapEncodeTiled",
        ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
            ctypes.c_void_p(ctypes.addressof(raw) + offset),
            kind,
            2,
            ctypes.c_void_p(pointer),
            (ctypes.c_uint64 * 2)(columns, rows),
            (ctypes.c_uint64 * 1)(stride * 2),
            (ctypes.c_uint32 * 2)(width, height),
            (ctypes.c_uint32 * 2)(1, 1),
            0,
            swizzle,
            L2_PROMOTION_256B,
            0,
        ),
    )
    return raw.raw[offset : offset + BYTES]
