"""Connections of a client to one service, kept and used again: an httpx transport.

httpx makes requests and takes responses; what is between is connection.py.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from typing import cast
from urllib.request import getproxies, proxy_bypass

import httpx

from encoder_service.client.connection import Connection

IDLE_SECONDS = 5.0
"""A connection that was not used for longer may have been closed at the other end: httpx's own."""


class Whole(httpx.AsyncByteStream):
    """A body that is there, given in one piece, not copied."""

    def __init__(self, body: bytes | bytearray) -> None:
        self.body = body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield cast(bytes, self.body)


class Connections(httpx.AsyncBaseTransport):
    """As many as there are requests at a time."""

    def __init__(self, *, tls: bool) -> None:
        self._tls: ssl.SSLContext | None = httpx.create_ssl_context() if tls else None
        self._idle: list[Connection] = []
        self._closed = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """The whole response. Raises httpx.TransportError."""
        seconds = request.extensions["timeout"]
        connection = self._kept() or await self._opened(request.url, seconds["connect"])
        received = await connection.exchange(request, await request.aread(), seconds["read"])
        if self._closed:
            connection.close()
        else:
            self._idle.append(connection)
        return httpx.Response(
            received.status, headers=received.headers, stream=Whole(received.body)
        )

    async def aclose(self) -> None:
        """Gives the connections back."""
        self._closed = True
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _kept(self) -> Connection | None:
        """The one used last, if any can be used; the others that cannot are let go of too."""
        oldest = time.monotonic() - IDLE_SECONDS
        for connection in self._idle:
            if connection.idle_since <= oldest:
                connection.close()
        self._idle = [connection for connection in self._idle if not connection.closed]
        return self._idle.pop() if self._idle else None

    async def _opened(self, url: httpx.URL, seconds: float) -> Connection:
        host = url.raw_host.decode()
        port = url.port or (443 if self._tls else 80)
        try:
            async with asyncio.timeout(seconds):
                _, connection = await asyncio.get_running_loop().create_connection(
                    Connection, host, port, ssl=self._tls
                )
        except TimeoutError as error:
            raise httpx.ConnectTimeout(f"no connection within {seconds:g} s") from error
        except (OSError, UnicodeError) as error:  # the latter: no name of a host
            raise httpx.ConnectError(str(error)) from error
        return connection


def direct(url: str) -> Connections | None:
    """To a service that the environment names no proxy for; None: httpx goes by the proxy.

    Nor for a URL with a name and a password, of which httpx makes a header.
    """
    address = httpx.URL(url)
    proxies = getproxies()
    proxied = address.scheme in proxies or "all" in proxies
    if address.userinfo or (proxied and not proxy_bypass(address.host)):
        return None
    return Connections(tls=address.scheme == "https")
