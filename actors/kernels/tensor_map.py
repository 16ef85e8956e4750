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
SWIZZLE_NONE, SWIZZLE_128B, L2_PROMOTION_256B = 0, 3, 3
"""CU_TENSOR_MAP_*."""


def tensor_map(matrix: Tensor, box: tuple[int, int], *, swizzled: bool = True) -> bytes:
    """The map by which boxes of (rows, columns) of a 16-bit matrix [rows, columns] are copied.

    A box comes as rows of 128 bytes in shared memory, swizzled, whatever its columns, 64 at most,
    or else as rows of just its columns; what lies beyond the matrix comes as zeros.
    """
    rows, columns = matrix.shape
    swizzle = SWIZZLE_128B if swizzled else SWIZZLE_NONE
    return encoded(matrix.data_ptr(), TYPES[matrix.dtype], rows, columns, box, swizzle)


@lru_cache(maxsize=4096)
def encoded(
    pointer: int, kind: int, rows: int, columns: int, box: tuple[int, int], swizzle: int
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
            (ctypes.c_uint64 * 1)(columns * 2),
            (ctypes.c_uint32 * 2)(width, height),
            (ctypes.c_uint32 * 2)(1, 1),
            0,
            swizzle,
            L2_PROMOTION_256B,
            0,
        ),
    )
    return raw.raw[offset : offset + BYTES]
