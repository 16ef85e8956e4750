"""A document of maps, lists and tensors as bytes: msgpack, JSON, safetensors.

Knows nothing of what the documents mean beyond: "items" is a list, and the "data" of an item is the
memory of a tensor of that item's "dtype" and "shape".
"""

from __future__ import annotations

import base64
import binascii
import json
import struct
from collections.abc import Callable, Iterator
from typing import Any, Literal, NoReturn

import msgpack
import numpy as np

from encoder_service.wire import tensors

MSGPACK = "application/msgpack"
JSON = "application/json"
SAFETENSORS = "application/vnd.safetensors"

MOST_ENTRIES = 65_536
"""Of one msgpack array or map. Of a whole request: bounds.py."""

CHUNK_CHARACTERS = 2**22
"""Of base64 at a time: each call holds the interpreter. Divisible by 4, three quarters by 3."""

Document = dict[str, Any]

Piece = bytes | memoryview
"""Of a body; its length is its number of bytes."""


class WireError(ValueError):
    """Bytes that cannot be read, or a format that nobody speaks here."""

    def __init__(
        self, message: str, kind: Literal["malformed", "unsupported"] = "malformed"
    ) -> None:
        super().__init__(message)
        self.kind = kind


def write_msgpack(answer: Document, encoding: str) -> list[Piece]:
    """Data as bin, where it lies."""
    packer = msgpack.Packer()
    pieces: list[Piece] = [packer.pack_map_header(len(answer))]
    for name, value in answer.items():
        pieces.append(packer.pack(name))
        if name != "items":
            pieces.append(packer.pack(value))
            continue
        pieces.append(packer.pack_array_header(len(value)))
        for item in value:
            pieces.append(packer.pack_map_header(len(item)))
            for key, content in item.items():
                pieces.append(packer.pack(key))
                pieces += bin32(content) if key == "data" else [packer.pack(content)]
    return pieces


def bin32(data: Piece) -> list[Piece]:
    """Bytes as msgpack writes long ones: 0xC6, their number, themselves."""
    view = memoryview(data).cast("B")
    return [struct.pack(">BI", 0xC6, len(view)), view]


def write_json(answer: Document, encoding: str) -> list[Piece]:
    """Data as base64 or rows of numbers. Put together from pieces, so that none takes long."""
    if encoding not in ("base64", "float"):
        raise WireError(f'options.encoding must be "base64" or "float", not {encoding!r}')
    data_pieces = float_pieces if encoding == "float" else base64_pieces
    pieces = [json.dumps(without(answer, "items")).encode()[:-1], b', "items": [']
    for position, item in enumerate(answer["items"]):
        pieces.append(b", " if position else b"")
        pieces.append(json.dumps(without(item, "data"), allow_nan=False).encode())
        if "data" in item:
            pieces[-1] = pieces[-1][:-1]
            pieces += [b', "data": ', *data_pieces(item), b"}"]
    return [b"".join([*pieces, b"]}"])]


def float_pieces(item: Document) -> Iterator[bytes]:
    """The tensor as rows of numbers."""
    array = tensors.to_array(item["data"], item["dtype"], item["shape"])
    for position, row in enumerate(array):
        yield b", " if position else b"["
        yield json.dumps(row.astype(np.float32).tolist(), allow_nan=False).encode()
    yield b"]" if len(array) else b"[]"


def base64_pieces(item: Document) -> Iterator[bytes]:
    """The tensor's memory as a string."""
    view, step = memoryview(item["data"]).cast("B"), CHUNK_CHARACTERS * 3 // 4
    yield b'"'
    for start in range(0, len(view), step):
        yield base64.b64encode(view[start : start + step])
    yield b'"'


def without(document: Document, name: str) -> Document:
    """All but one entry."""
    return {key: value for key, value in document.items() if key != name}


def write_safetensors(answer: Document, encoding: str) -> list[Piece]:
    """Tensors "0", "1", ... by index; all else is JSON under "answer" in the metadata."""
    named = {str(item["index"]): item for item in answer["items"] if "data" in item}
    items = [without(item, "data") for item in answer["items"]]
    return [tensors.to_safetensors(named, {"answer": json.dumps({**answer, "items": items})})]


def read_safetensors(body: bytes) -> Document:
    """What write_safetensors wrote."""
    try:
        data, metadata = tensors.from_safetensors(body)
        document = read_json(metadata["answer"].encode())
        for item in document["items"]:
            if not item.keys() & {"error", "reference"}:
                item["data"] = data[str(item["index"])]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WireError(f"not a safetensors response: {error!r}") from error
    return document


def read_msgpack(body: bytes) -> Document:
    """A map. No extension types, no long arrays."""
    try:
        document = msgpack.unpackb(
            body,
            max_array_len=MOST_ENTRIES,
            max_map_len=MOST_ENTRIES,
            max_ext_len=0,
            ext_hook=refuse_extension,
        )
    except ValueError as error:
        reason = str(error) or "it is nested too deeply"
        raise WireError(f"the body is not msgpack that can be read: {reason}") from error
    return as_map(document)


def read_json(body: bytes) -> Document:
    """A map."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WireError(f"the body is not JSON that can be read: {error}") from error
    return as_map(document)


def refuse_extension(code: int, data: bytes) -> NoReturn:
    """Extension types could be anything."""
    raise WireError(f"the body has a msgpack extension of type {code}: send plain types only")


def from_base64(text: str, where: str) -> bytes:
    """Strict: no line breaks, no other alphabet, right padding."""
    try:
        if text.find("=", 0, -2) >= 0:
            raise ValueError("padding before its end")
        steps = range(0, len(text), CHUNK_CHARACTERS)
        chunks = (text[start : start + CHUNK_CHARACTERS] for start in steps)
        return b"".join([base64.b64decode(chunk, validate=True) for chunk in chunks])
    except (binascii.Error, ValueError) as error:
        raise WireError(f"{where} is not base64: {error}") from error


def as_map(document: Any) -> Document:
    """A map with names as keys."""
    if not isinstance(document, dict):
        raise WireError(f"the body must be a map, not {type(document).__name__}")
    return document


WRITERS: dict[str, Callable[[Document, str], list[Piece]]] = {
    MSGPACK: write_msgpack,
    JSON: write_json,
    SAFETENSORS: write_safetensors,
}
READERS: dict[str, Callable[[bytes], Document]] = {
    MSGPACK: read_msgpack,
    JSON: read_json,
    SAFETENSORS: read_safetensors,
}
