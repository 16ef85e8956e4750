"""One HTTP/1.1 connection of a client: a body of known length is read to where it stays.

h11 writes the head of the request and reads that of the answer. A body of megabytes it would copy
four times, 64 KB at a time, which takes several times as long as the network.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import cast

import h11
import httpx

BUFFER_BYTES = 64 * 1024
"""For heads, and for bodies whose length is not known before."""
PIECE_BYTES = 256 * 1024
"""Of a request: what the transport does not get rid of at once, it copies."""


@dataclass(frozen=True, slots=True)
class Received:
    """A whole response."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes | bytearray
    last: bool
    """The connection takes no other request."""


class Connection(asyncio.BufferedProtocol):
    """For one request at a time; made by an event loop's `create_connection`."""

    def __init__(self) -> None:
        self.idle_since = time.monotonic()
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._answer: asyncio.Future[Received] | None = None
        """Of the request that is under way."""
        self._seen_bytes = 0
        self._body = bytearray()
        self._rest: memoryview | None = None
        """What is still to come of a body of known length."""
        self._pieces: list[bytes] = []
        """Of another body."""
        self._unsent = memoryview(b"")
        """What the transport has not taken yet of a request."""
        self._full = False
        """The transport takes no more for now."""

    @property
    def closed(self) -> bool:
        """It takes no other request."""
        return self._transport.is_closing()

    def close(self) -> None:
        """At once."""
        self._transport.abort()

    async def exchange(self, request: httpx.Request, content: bytes, seconds: float) -> Received:
        """The response. Raises httpx.TransportError, also after so many seconds without a byte.

        Closed unless that was not the last.
        """
        answer: asyncio.Future[Received] = asyncio.get_running_loop().create_future()
        self._answer = answer
        self._parser = parser = h11.Connection(h11.CLIENT, BUFFER_BYTES)
        self._pieces = []
        try:
            head = h11.Request(
                method=request.method, target=request.url.raw_path, headers=request.headers.raw
            )
            beginning = [parser.send(head) or b"", content[:PIECE_BYTES]]
            parser.send_with_data_passthrough(h11.Data(data=content))
            parser.send(h11.EndOfMessage())
            self._unsent = memoryview(content)[PIECE_BYTES:]
            self._transport.writelines(beginning)
            self._send()
            while not answer.done():
                seen = self._seen_bytes
                await asyncio.wait([answer], timeout=seconds)
                if self._seen_bytes == seen and not answer.done():
                    raise httpx.ReadTimeout(f"nothing came for {seconds:g} s")
            received = answer.result()
        except BaseException as error:
            self._answer = None
            self.close()
            if isinstance(error, h11.LocalProtocolError):  # a header that cannot be sent
                raise httpx.LocalProtocolError(str(error)) from error
            raise
        self._answer = None
        self.idle_since = time.monotonic()
        if received.last:
            self.close()
        return received

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.BufferedProtocol, as of all that follow."""
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        return self._buffer if self._rest is None else self._rest

    def buffer_updated(self, nbytes: int) -> None:
        """So many came."""
        self._seen_bytes += nbytes
        if self._answer is None or self._answer.done():
            self.close()  # nobody asked for it
        elif self._rest is None:
            self._read(bytes(self._buffer[:nbytes]))
        else:
            self._came(nbytes)

    def pause_writing(self) -> None:
        """The other end is slower."""
        self._full = True

    def resume_writing(self) -> None:
        """It has come nearly as far."""
        self._full = False
        self._send()

    def eof_received(self) -> None:
        """No more will come: the end of a body without a length."""
        if self._answer and not self._answer.done() and self._rest is None:
            self._read(b"")

    def connection_lost(self, exc: Exception | None) -> None:
        """What is under way will not come."""
        self._fail(httpx.ReadError(f"the connection broke: {exc or 'it was closed'}"))

    def _send(self) -> None:
        """As much of the request as is taken."""
        while self._unsent and not self._full:
            piece, self._unsent = self._unsent[:PIECE_BYTES], self._unsent[PIECE_BYTES:]
            self._transport.write(piece)

    def _read(self, data: bytes) -> None:
        """By h11: heads, and bodies without a length."""
        try:
            self._parser.receive_data(data)
            while (event := self._parser.next_event()) is not h11.NEED_DATA:
                if isinstance(event, h11.Response):
                    self._response = event
                    if (size_bytes := length(event)) is not None:
                        self._begin(size_bytes)
                        return
                elif isinstance(event, h11.Data):
                    self._pieces.append(bytes(event.data))
                elif isinstance(event, h11.EndOfMessage):
                    self._finish(b"".join(self._pieces))
                    if self._parser.trailing_data[0]:
                        self.close()  # nobody asked for more
                    return
        except h11.RemoteProtocolError as error:
            self._fail(httpx.RemoteProtocolError(str(error)))

    def _begin(self, size_bytes: int) -> None:
        """A body of known length, of which h11 has the beginning."""
        self._body = bytearray(size_bytes)
        self._rest = memoryview(self._body)
        start, _ = self._parser.trailing_data
        if len(start) > size_bytes:
            self._fail(httpx.RemoteProtocolError("more than the content-length came"))
            return
        self._rest[: len(start)] = start
        self._came(len(start))

    def _came(self, nbytes: int) -> None:
        """More of that body."""
        assert self._rest is not None
        self._rest = self._rest[nbytes:]
        if not self._rest:
            body, self._body, self._rest = self._body, bytearray(), None
            self._finish(body)

    def _finish(self, body: bytes | bytearray) -> None:
        response = self._response
        headers = list(response.headers)
        last = response.http_version < b"1.1" or any(
            name == b"connection" and b"close" in value.lower() for name, value in headers
        )
        last |= bool(self._unsent)  # it was refused early: the rest is of no use
        assert self._answer is not None
        self._answer.set_result(Received(response.status_code, headers, body, last))

    def _fail(self, error: httpx.TransportError) -> None:
        self._rest = None
        if self._answer and not self._answer.done():
            self._answer.set_exception(error)


def length(response: h11.Response) -> int | None:
    """Bytes of the body; None: it is for h11 to say."""
    headers = dict(response.headers)
    given = headers.get(b"content-length", b"")
    if response.status_code in (204, 304) or b"transfer-encoding" in headers or not given.isdigit():
        return None
    return int(given)
