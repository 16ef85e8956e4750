"""Messages over a socket between two processes of a node, each behind its length.

Addresses are Linux's abstract ones: they leave no file behind, and are seen only from the network
namespace in which they are bound. Whoever is at the other end must be of the same user.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from secrets import token_hex
from typing import cast

LENGTH = struct.Struct("<Q")
MOST_BYTES = 2**26
"""Of a message; ours are a few MB."""
CREDENTIALS = struct.Struct("3i")
"""Process, user and group of the other end, as Linux tells them."""


class Messages(asyncio.Protocol):
    """One end of a connection. Its owner is told of whole messages, and of the end, once."""

    def __init__(self, heard: Callable[[bytes], None], ended: Callable[[], None]) -> None:
        self.heard = heard
        self.ended = ended
        self._came = bytearray()
        self._transport: asyncio.Transport | None = None

    @property
    def closing(self) -> bool:
        """Nothing is sent any more."""
        return self._transport is None or self._transport.is_closing()

    @property
    def unsent_bytes(self) -> int:
        """What the other end has not taken yet."""
        return self._transport.get_write_buffer_size() if self._transport else 0

    def send(self, message: bytes) -> None:
        """As soon as it goes; nothing once it is closed."""
        if self._transport and not self._transport.is_closing():
            self._transport.writelines([LENGTH.pack(len(message)), message])

    def close(self) -> None:
        """When all is sent."""
        if self._transport:
            self._transport.close()

    def abort(self) -> None:
        """At once."""
        if self._transport:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol, as of all that follow."""
        self._transport = cast(asyncio.Transport, transport)
        if not ours(transport.get_extra_info("socket")):
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Some of a message, or several."""
        self._came += data
        start = 0
        while len(self._came) - start >= LENGTH.size:
            (size,) = LENGTH.unpack_from(self._came, start)
            if size > MOST_BYTES:
                raise ValueError(f"a message of {size} bytes: the other end is not one of ours")
            end = start + LENGTH.size + size
            if len(self._came) < end:
                break
            self.heard(bytes(memoryview(self._came)[start + LENGTH.size : end]))
            start = end
        del self._came[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        """By either end."""
        self.ended()


def ours(connection: socket.socket) -> bool:
    """Whether the other end is a process of this user."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    _, user, _ = CREDENTIALS.unpack(told)
    return bool(user == os.geteuid())


def listen() -> tuple[socket.socket, str]:
    """A socket that is bound, and its address, which nobody else ever has."""
    address = f"encoder-service-{token_hex(8)}"
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"\0{address}")
    return listening, address


def connect(address: str) -> socket.socket | None:
    """To who listens there. None: nobody of this user does."""
    connecting = socket.socket(socket.AF_UNIX)
    connecting.setblocking(False)  # a process that hangs accepts nothing
    with suppress(OSError):
        connecting.connect(f"\0{address}")
        if ours(connecting):
            return connecting
    connecting.close()
    return None
