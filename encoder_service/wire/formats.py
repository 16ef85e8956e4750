"""Documents and tensors as bytes, without torch: msgpack, JSON, safetensors, .npz.

Only the "data" of a document's "items" is interpreted. It is the memory of a tensor of the item's
"dtype" and "shape". For float8_e4m3, "scales" has a scale for each row. numpy has neither float8
nor bfloat16, so both become float32 there.
"""

from __future__ import annotations

import base64
import binascii
import json
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

MSGPACK = "application/msgpack"
JSON = "application/json"
SAFETENSORS = "application/vnd.safetensors"
NPZ = "application/x-npz"

MOST_ENTRIES = 65_536  # in one msgpack array or map
MOST_VALUES = 8192
"""Maximum values in the body of a request. An item is five values, so a thousand items fit."""

FIXED_BYTES = {0xCA: 4, 0xCB: 8} | {first + i: 2**i for first in (0xCC, 0xD0) for i in range(4)}
"""Bytes that follow the first byte of a msgpack number."""
STRING_LENGTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""Bytes of the length field of msgpack binaries and strings."""
COUNT_LENGTHS = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
"""Bytes of the count field of msgpack arrays and maps."""
EXTENSIONS = {0xC7, 0xC8, 0xC9, *range(0xD4, 0xD9)}
CHUNK_CHARACTERS = 2**22
"""Characters of base64 per call, because a call holds the GIL. Divisible by 4, and three quarters
of it by 3."""

CODES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float8_e4m3": "F8_E4M3"}
"""The dtypes' names in safetensors files."""
WIDTHS = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3": 1}  # bytes per value

Document = dict[str, Any]
Buffer = bytes | bytearray | memoryview | npt.NDArray[np.uint8]
Piece = bytes | memoryview  # part of a body; its len() is its number of bytes


class WireError(ValueError):
    """Bytes that cannot be read."""


class UnsupportedType(WireError):
    """A body of a content type that is not supported."""


# The parsers of msgpack and JSON hold the GIL while they build values, and an empty list of one
# byte becomes 56 bytes. So the values in the body of a request are counted before it is parsed.


def check_json(body: bytes | bytearray, most: int = MOST_VALUES) -> None:
    """Raises WireError for too many values. base64 has none of the characters that are counted."""
    check_count(1 + body.count(b"[") + body.count(b"{") + body.count(b","), most)


def check_msgpack(body: bytes | bytearray) -> None:
    """Raises WireError if arrays and maps declare too many values, and for extensions.

    Reads only the headers, and skips the content of strings and binaries.
    """
    at, left, values = 0, 1, 1
    while left and at < len(body):
        first = body[at]
        at, left = at + 1, left - 1
        count = 0
        if 0x80 <= first < 0xA0:
            count = first & 0x0F if first >= 0x90 else 2 * (first & 0x0F)
        elif 0xA0 <= first < 0xC0:
            at += first & 0x1F
        elif first in STRING_LENGTHS:
            size = STRING_LENGTHS[first]
            at += size + int.from_bytes(body[at : at + size])
        elif first in COUNT_LENGTHS:
            size = COUNT_LENGTHS[first]
            count = int.from_bytes(body[at : at + size]) * (2 if first >= 0xDE else 1)
            at += size
        elif first in EXTENSIONS:
            raise WireError("the body has a msgpack extension: send plain types only")
        else:
            at += FIXED_BYTES.get(first, 0)
        left, values = left + count, values + count
        check_count(values, MOST_VALUES)


def check_count(values: int, most: int) -> None:
    if values > most:
        raise WireError(f"the body has more than {most} values: send fewer items at a time")


def write_msgpack(answer: Document, encoding: str) -> list[Piece]:
    """The data of an item is a separate piece, not a copy."""
    packer = msgpack.Packer(autoreset=False)
    pieces: list[Piece] = []
    packer.pack_map_header(len(answer))
    for name, value in answer.items():
        packer.pack(name)
        if name != "items":
            packer.pack(value)
            continue
        packer.pack_array_header(len(value))
        for item in value:
            packer.pack_map_header(len(item))
            for key, content in item.items():
                packer.pack(key)
                if key != "data":
                    packer.pack(content)
                    continue
                view = memoryview(content).cast("B")
                # msgpack's format bin 32
                pieces += [packer.bytes() + struct.pack(">BI", 0xC6, len(view)), view]
                packer.reset()
    return [*pieces, packer.bytes()]


def write_json(answer: Document, encoding: str) -> list[Piece]:
    """Data becomes base64 or rows of numbers, in chunks, so that no call holds the GIL for long."""
    data_pieces = float_pieces if encoding == "float" else base64_pieces
    pieces = [json.dumps(without(answer, "items")).encode()[:-1], b', "items": [']
    for position, item in enumerate(answer["items"]):
        pieces.append(b", " if position else b"")
        fields = without(item, "data")
        if "scales" in item:
            fields["scales"] = base64.b64encode(item["scales"]).decode()
        pieces.append(json.dumps(fields, allow_nan=False).encode())
        if "data" in item:
            pieces[-1] = pieces[-1][:-1]
            pieces += [b', "data": ', *data_pieces(item), b"}"]
    return [b"".join([*pieces, b"]}"])]


def float_pieces(item: Document) -> Iterator[bytes]:
    array = array_of(item)
    for position, row in enumerate(array):
        yield b", " if position else b"["
        yield json.dumps(row.astype(np.float32).tolist(), allow_nan=False).encode()
    yield b"]" if len(array) else b"[]"


def base64_pieces(item: Document) -> Iterator[bytes]:
    view, step = memoryview(item["data"]).cast("B"), CHUNK_CHARACTERS * 3 // 4
    yield b'"'
    for start in range(0, len(view), step):
        yield base64.b64encode(view[start : start + step])
    yield b'"'


def without(document: Document, *names: str) -> Document:
    return {key: value for key, value in document.items() if key not in names}


def write_safetensors(answer: Document, encoding: str) -> list[Piece]:
    """Tensors are named "0", "1", ... by index, their scales "0.scales", "1.scales", ... The rest
    of the document is JSON, as "answer" in the metadata."""
    named = {str(item["index"]): item for item in answer["items"] if "data" in item}
    scales = {
        f"{name}.scales": {"dtype": "float32", "shape": item["shape"][:1], "data": item["scales"]}
        for name, item in named.items()
        if "scales" in item
    }
    items = [without(item, "data", "scales") for item in answer["items"]]
    # Scales first, so that they stay aligned.
    return to_safetensors(scales | named, {"answer": json.dumps({**answer, "items": items})})


def to_safetensors(
    tensors: Mapping[str, Mapping[str, Any]], metadata: Mapping[str, str]
) -> list[Piece]:
    """A safetensors file of tensors given as {"dtype", "shape", "data"}; the data is not copied."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    chunks: list[Piece] = []
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
    return [len(text).to_bytes(8, "little") + text, *chunks]


def write_npz(answer: Document, encoding: str) -> list[Piece]:
    """A file for numpy.load: arrays "0", "1", ... by index, and the rest as "answer.json"."""
    found = [item for item in answer["items"] if "data" in item]
    arrays = {str(item["index"]): array_of(item) for item in found}
    items = [without(item, "data", "scales") for item in answer["items"]]
    file = BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    with zipfile.ZipFile(file, "a") as members:
        members.writestr("answer.json", json.dumps({**answer, "items": items}))
    return [file.getbuffer()]


def array_of(item: Document) -> npt.NDArray[Any]:
    """The tensor of an item."""
    return to_array(item["data"], item["dtype"], item["shape"], item.get("scales", b""))


def to_array(
    data: Buffer, dtype: str, shape: Sequence[int], scales: Buffer = b""
) -> npt.NDArray[Any]:
    """Row-major little-endian memory as an array of `shape`. bfloat16 becomes float32, exactly.
    float8_e4m3 becomes float32, multiplied by its `scales`.

    float16 and float32 are views of `data`. Raises ValueError if the sizes do not agree.
    """
    if dtype == "float8_e4m3":
        values = E4M3.take(np.frombuffer(data, np.uint8)).reshape(shape)
        values *= np.frombuffer(scales, "<f4").reshape(shape[0], 1)
        return values
    if dtype == "bfloat16":
        upper = np.frombuffer(data, "<u2").reshape(shape)  # the upper half of a float32
        return (upper.astype("<u4") << np.uint32(16)).view("<f4")
    if dtype not in CODES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(CODES)}")
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).reshape(shape)


def read_msgpack(body: bytes | bytearray) -> Document:
    """Reads a map without long arrays. Raises WireError."""
    try:
        document = msgpack.unpackb(
            body,
            max_array_len=MOST_ENTRIES,
            max_map_len=MOST_ENTRIES,
            max_ext_len=0,
        )
    except ValueError as error:
        reason = str(error) or "it is nested too deeply"
        raise WireError(f"the body cannot be read as msgpack: {reason}") from error
    return as_map(document)


def read_json(body: bytes | bytearray, most: int | None = None) -> Document:
    """Raises WireError, also for a body of a request with more than `most` values."""
    if most is not None:
        check_json(body, most)
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WireError(f"the body is not JSON: {error}") from error
    return as_map(document)


def from_base64(text: str, where: str) -> bytes:
    """Decodes strict base64: no line breaks, one alphabet, correct padding. Raises WireError."""
    try:
        if text.find("=", 0, -2) >= 0:
            raise ValueError("padding before its end")
        steps = range(0, len(text), CHUNK_CHARACTERS)
        chunks = (text[start : start + CHUNK_CHARACTERS] for start in steps)
        return b"".join([base64.b64decode(chunk, validate=True) for chunk in chunks])
    except (binascii.Error, ValueError) as error:
        raise WireError(f"{where} is not base64: {error}") from error


def e4m3() -> npt.NDArray[np.float32]:
    """The value of each byte: a sign, four bits of exponent, three of mantissa; no infinities."""
    exponent, mantissa = np.divmod(np.arange(128), 8)
    normal = np.ldexp((8 + mantissa).astype(np.float32), exponent - 10)
    found = np.where(exponent > 0, normal, np.ldexp(mantissa.astype(np.float32), -9))
    found[-1] = np.nan
    return np.concatenate([found, -found])


E4M3 = e4m3()


def as_map(document: Any) -> Document:
    if not isinstance(document, dict):
        raise WireError(f"the body must be a map, not {type(document).__name__}")
    return document


WRITERS: dict[str, Callable[[Document, str], list[Piece]]] = {
    MSGPACK: write_msgpack,
    JSON: write_json,
    SAFETENSORS: write_safetensors,
    NPZ: write_npz,
}
