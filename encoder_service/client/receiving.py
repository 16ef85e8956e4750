"""Reads the rows of a safetensors response, each tensor into its own buffer.

aiohttp copies twice what arrives. Of most responses only the beginning passes through aiohttp, and
`Takeover` receives the rest directly into the buffers.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
from collections.abc import Iterator
from socket import SO_RCVLOWAT, SOL_SOCKET
from typing import Any

import aiohttp

from encoder_service.wire.formats import Document, WireError, read_json

MOST_HEADER_BYTES = 2**26
"""Limit for the header of a safetensors response, which is everything but the rows."""
MOST_ROWS_BYTES = 2**31  # more than any limits.max_response_bytes
WAKE_BYTES = 2**20
"""A socket wakes its reader for this many bytes, or the rest. By default it wakes it for each
packet, which takes as long as copying the packet."""

uninitialised: Any = ctypes.pythonapi.PyByteArray_FromStringAndSize
uninitialised.restype, uninitialised.argtypes = (
    ctypes.py_object,
    [ctypes.c_void_p, ctypes.c_ssize_t],
)
"""Called with (None, size). Returns a bytearray that is not zeroed, because zeroing takes a quarter
of the time of receiving the data."""


class Space:
    """Buffers that are filled one after another. `bytes_left`: free space in all of them. `left`:
    free space in the first one that is not full. Empty if all are full."""

    def __init__(self, buffers: Iterator[memoryview], size_bytes: int) -> None:
        self._buffers = buffers
        self.bytes_left = size_bytes
        self.left = memoryview(b"")
        self.advance(0)

    def advance(self, count: int) -> None:
        """Records that this many bytes were written to `left`."""
        self.bytes_left -= count
        self.left = self.left[count:]
        while not self.left and (following := next(self._buffers, None)) is not None:
            self.left = following

    def fill(self, piece: memoryview) -> memoryview:
        """Copies a piece. Returns the part for which there is no space."""
        while piece and self.left:
            count = min(len(piece), len(self.left))
            self.left[:count] = piece[:count]
            self.advance(count)
            piece = piece[count:]
        return piece


class Takeover(asyncio.BufferedProtocol):
    """Takes the connection of a response from aiohttp until its body has been received."""

    def __init__(self, response: aiohttp.ClientResponse, timeout_seconds: float) -> None:
        """`timeout_seconds`: maximum time in which nothing arrives."""
        self._response = response
        self._timeout_seconds = timeout_seconds
        names = {name.lower() for name in response.headers}
        encoded = names & {"content-encoding", "transfer-encoding"}
        self.body_bytes = None if encoded else response.content_length
        """None: the connection cannot be taken over."""

    async def receive(self, space: Space) -> None:
        """Fills the space with the rest of the body, which still has to come from the socket.
        Raises aiohttp.ClientError."""
        connection = self._response.connection
        if connection is None or connection.transport is None or connection.protocol is None:
            raise aiohttp.ClientPayloadError("the connection was closed within the response")
        self._space = space
        self._transport: Any = connection.transport
        self._aiohttp = connection.protocol
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # With TLS, some of the rest may already have been read from the socket.
        low = sys.platform == "linux" and not self._transport.get_extra_info("sslcontext")
        self._socket = self._transport.get_extra_info("socket") if low else None
        self._wake_bytes = 1
        self._wake_for(min(WAKE_BYTES, space.bytes_left))
        self._switch(self)
        try:
            while not self._ended.done():
                before = space.bytes_left
                await asyncio.wait([self._ended], timeout=self._timeout_seconds)
                if space.bytes_left == before and not self._ended.done():
                    raise aiohttp.SocketTimeoutError("the transfer stalled")
            self._ended.result()
        finally:
            if not self._ended.done():
                self._end()
        self._response.content.feed_eof()

    def _wake_for(self, size_bytes: int) -> None:
        if self._socket and size_bytes != self._wake_bytes:
            self._wake_bytes = size_bytes
            self._socket.setsockopt(SOL_SOCKET, SO_RCVLOWAT, size_bytes)

    def _switch(self, protocol: asyncio.BaseProtocol) -> None:
        """Pauses reading meanwhile, because uvloop reads for the protocol that was set when reading
        began."""
        self._transport.pause_reading()
        self._transport.set_protocol(protocol)
        self._transport.resume_reading()

    def _end(self, error: Exception | None = None) -> None:
        self._wake_for(1)
        self._switch(self._aiohttp)
        self._finish(error)

    def _finish(self, error: Exception | None) -> None:
        if self._ended.done():
            return
        if error:
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)

    # Called by the transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._space.left

    def buffer_updated(self, nbytes: int) -> None:
        try:
            self._space.advance(nbytes)
        except Exception as error:  # the next buffer is invalid or too large
            self._end(error)
            return
        if self._space.left:
            self._wake_for(min(self._wake_bytes, self._space.bytes_left))
        else:
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish(aiohttp.ClientPayloadError(f"closed within the response: {exc!r}"))
        self._aiohttp.connection_lost(exc)

    def pause_writing(self) -> None:
        self._aiohttp.pause_writing()

    def resume_writing(self) -> None:
        self._aiohttp.resume_writing()


async def read_embeddings(
    content: aiohttp.StreamReader, takeover: Takeover | None = None
) -> Document:
    """Reads a safetensors response: its document, with "data" and "scales" of each item in buffers.

    Raises WireError, or aiohttp.ClientError.
    """
    try:
        length = int.from_bytes(await content.readexactly(8), "little")
        if length > MOST_HEADER_BYTES:
            raise WireError(f"the header has {length} bytes, over {MOST_HEADER_BYTES}")
        header = read_json(await content.readexactly(length))
        document = read_json(header.pop("__metadata__")["answer"])
        items = {str(item["index"]): item for item in document["items"]}
        end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
        if takeover and takeover.body_bytes != 8 + length + end:
            takeover = None
        space, rest = Space(buffers(header, items), end), memoryview(b"")
        while space.left and not rest:
            piece = content.read_nowait() if takeover else await content.readany()
            if not piece and takeover and not content.is_eof():
                await takeover.receive(space)
            elif not piece:
                raise WireError("the response ends within an embedding")
            rest = space.fill(memoryview(piece))
        if rest or await content.readany():  # a connection is reused if it was read to its end
            raise WireError("the response goes on after its embeddings")
    except asyncio.IncompleteReadError:
        raise WireError("the response ends within its header") from None
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, MemoryError) as error:
        if isinstance(error, WireError):
            raise
        raise WireError(f"not a response of this service: {error!r}") from error
    return document


def buffers(header: Document, items: dict[str, Document]) -> Iterator[memoryview]:
    """Yields the buffer of each tensor, made when the one before is full, and puts it into its
    item."""
    position = 0
    for name, tensor in header.items():
        start, end = tensor["data_offsets"]
        if start != position or not start <= end <= MOST_ROWS_BYTES:
            raise ValueError(f"tensor {name!r} cannot be at {start} to {end}")
        data, position = uninitialised(None, end - start), end
        index, _, part = name.partition(".")
        items[index][part or "data"] = data
        if data:
            yield memoryview(data)
