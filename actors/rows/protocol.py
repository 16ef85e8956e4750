"""The messages between a RowsServer and its readers. The requests of a connection are answered one
after another; a reader may send several before it reads.

    request   one byte each of version and verb, then the 32 characters of an id after its first "."
    answer    4 bytes, the length of what follows: JSON, either fields or {"error": a sentence}
    rows      after the answer to READ or TAKE, as many bytes as it says

HOLD keeps an embedding from being evicted, and its memory from being reused, until FREE or the end
of the connection. A connection ends when nothing is received for HOLD_SECONDS.

TAKE, followed by the 32 characters after the second ".", is the only request needed for an id that
was made for one reader: the id is released once its rows have been sent. If they cannot be sent, it
stays.

A server without room for another connection ends the least recently used one that holds nothing.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields
from time import monotonic
from typing import Any, Literal

VERSION = 1
"""Raised whenever older and newer processes would misunderstand each other."""
HOLD, READ, FREE, PING, TAKE = b"h", b"r", b"f", b"p", b"t"
NAME_BYTES = 32  # of each half of a name: store.kept.ID_BYTES in base64
NO_NAME = "-" * NAME_BYTES
REQUEST_BYTES = 2 + NAME_BYTES
LENGTH_BYTES = 4
MOST_ANSWER_BYTES = 2**16
HOLD_SECONDS = 60.0
PIECE_BYTES = 2**24
"""Maximum sent or received by one system call, during which the GIL is released."""
SLOW_BYTES_PER_SECOND = 20e6


@dataclass(frozen=True, slots=True)
class MemoryHandle:
    """How another process opens memory: see memory.py and shared.py."""

    kind: Literal["cuda", "shared"]
    where: str
    """cuda: the cudaIpcMemHandle_t of the allocation, in hexadecimal. shared: a path."""
    offset: int  # of the memory within that
    size_bytes: int
    check: str
    """cuda: UUID of the GPU. shared: the key, because the path is another file in another
    container."""


@dataclass(frozen=True, slots=True)
class HeldRows:
    """What a reader is told about rows that it holds."""

    shape: tuple[int, int]
    dtype: str
    model: str
    deepstack: int  # features, each as wide as the main one
    memory: MemoryHandle | None = None  # where they are complete, for processes that can open it
    offset: int = 0

    @classmethod
    def read(cls, fields: dict[str, Any]) -> HeldRows:
        """Raises TypeError, KeyError."""
        memory = fields["memory"] and MemoryHandle(**fields["memory"])
        tokens, width = fields["shape"]
        return cls(**fields | {"memory": memory, "shape": (int(tokens), int(width))})


@dataclass(frozen=True, slots=True)
class RowsPlace:
    """Where a replica's RowsServer listens."""

    unix: str  # path of the socket, for processes of the replica's user
    tcp: str  # address and port
    version: int = VERSION

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> RowsPlace:
        """From the front door's response, of which a newer version may have more fields. Raises
        KeyError."""
        return cls(**{one.name: told[one.name] for one in fields(cls)})


def limited(connection: socket.socket, receive_seconds: float, send_seconds: float) -> None:
    """Sets time limits for blocking system calls. Python's own timeouts would take the GIL for
    every piece that arrives."""
    connection.setblocking(True)
    for option, seconds in (
        (socket.SO_RCVTIMEO, receive_seconds),
        (socket.SO_SNDTIMEO, send_seconds),
    ):
        whole = int(seconds)
        limit = struct.pack("ll", whole, int((seconds - whole) * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, option, limit)
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def transfer_seconds(size_bytes: int) -> float:
    """Time limit of a transfer: 10 s plus the time that a slow network takes."""
    return 10.0 + size_bytes / SLOW_BYTES_PER_SECOND


def receive_into(connection: socket.socket, target: memoryview) -> None:
    """Fills `target`. Raises OSError (ConnectionError at the end of the stream, TimeoutError)."""
    end = monotonic() + transfer_seconds(len(target))
    while target:
        count = connection.recv_into(target[:PIECE_BYTES], 0, socket.MSG_WAITALL)
        if not count:
            raise ConnectionError("the connection was closed")
        target = target[count:]
        if target and monotonic() > end:
            raise TimeoutError("not received in time")


def send(connection: socket.socket, data: memoryview) -> None:
    """Sends all data, without copying it. Raises OSError."""
    end = monotonic() + transfer_seconds(len(data))
    while data:
        data = data[connection.send(data[:PIECE_BYTES]) :]
        if data and monotonic() > end:
            raise TimeoutError("not sent in time")


def answer(fields: dict[str, Any]) -> bytes:
    text = json.dumps(fields).encode()
    return len(text).to_bytes(LENGTH_BYTES, "big") + text


def receive_answer(connection: socket.socket) -> dict[str, Any]:
    """Raises OSError, ValueError."""
    head = bytearray(LENGTH_BYTES)
    receive_into(connection, memoryview(head))
    length = int.from_bytes(head, "big")
    if length > MOST_ANSWER_BYTES:
        raise ValueError(f"an answer of {length} bytes")
    text = bytearray(length)
    receive_into(connection, memoryview(text))
    fields: dict[str, Any] = json.loads(text)
    if not isinstance(fields, dict):
        raise ValueError("an answer that is not an object")
    return fields
