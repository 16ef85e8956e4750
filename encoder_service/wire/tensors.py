"""Tensors as bytes without torch: numpy arrays and safetensors files.

numpy has no bfloat16. Its bytes are the upper half of a float32, so it is widened to float32.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Buffer = bytes | memoryview | npt.NDArray[np.uint8]

CODES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""The dtypes' names in safetensors files."""
WIDTHS = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes per value."""


def to_array(data: Buffer, dtype: str, shape: Sequence[int]) -> npt.NDArray[Any]:
    """Row-major little-endian memory as an array of `shape`. bfloat16 becomes float32, exactly.

    float16 and float32 are views of `data`. Raises ValueError if the sizes do not agree.
    """
    if dtype == "bfloat16":
        upper = np.frombuffer(data, "<u2").reshape(shape)
        return (upper.astype("<u4") << np.uint32(16)).view("<f4")
    if dtype not in CODES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(CODES)}")
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).reshape(shape)


def from_rows(rows: Sequence[Sequence[float]], dtype: str) -> bytes:
    """The memory of rows of numbers; exact if they came from `dtype`. Raises ValueError."""
    # np.dtype would parse any string as an expression.
    if dtype not in CODES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(CODES)}")
    values = np.asarray(rows, "<f4")
    if dtype == "bfloat16":
        return (values.view("<u4") >> np.uint32(16)).astype("<u2").tobytes()
    return values.astype(np.dtype(dtype).newbyteorder("<")).tobytes()


def to_safetensors(tensors: Mapping[str, Mapping[str, Any]], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file of tensors given as {"dtype", "shape", "data"}."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    chunks: list[memoryview] = []
    end = 0
    for name, tensor in tensors.items():
        data = memoryview(tensor["data"]).cast("B")
        header[name] = {
            "dtype": CODES[tensor["dtype"]],
            "shape": list(tensor["shape"]),
            "data_offsets": [end, end + len(data)],
        }
        chunks.append(data)
        end += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # readers map the file, and want aligned tensors
    return b"".join([len(text).to_bytes(8, "little"), text, *chunks])


def from_safetensors(
    body: bytes | bytearray,
) -> tuple[dict[str, bytes | bytearray], dict[str, str]]:
    """The memory of each tensor, and the metadata. Raises ValueError for a broken file."""
    start = 8 + int.from_bytes(body[:8], "little")
    if len(body) < start:
        raise ValueError("the safetensors file ends within its header")
    header = json.loads(body[8:start])
    metadata = header.pop("__metadata__", {})
    dtypes = {code: dtype for dtype, code in CODES.items()}
    tensors = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        tensors[name] = body[start + first : start + last]
        expected = math.prod(entry["shape"]) * WIDTHS[dtypes[entry["dtype"]]]
        if len(tensors[name]) != expected:
            raise ValueError(f"tensor {name!r} has {len(tensors[name])} bytes, not {expected}")
    return tensors, metadata
