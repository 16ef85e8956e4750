"""A client's calls over HTTP. The scheme of the URL chooses between HTTP and gRPC."""

from __future__ import annotations

import ctypes
import json
import os
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import quote, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import msgpack
from yarl import URL

from encoder_service.client.items import ServiceError, check_each, service_error
from encoder_service.client.receiving import Takeover, read_embeddings
from encoder_service.wire.documents import RequestItem
from encoder_service.wire.formats import JSON, MSGPACK, SAFETENSORS, Document, WireError, read_json

if TYPE_CHECKING:
    from encoder_service.client.grpc_transport import GrpcTransport

IDLE_SECONDS = 5.0
"""Connections idle for longer are closed, because the server may have closed its end by then."""
HEAD_BYTES = 64 * 1024  # longest line and header value of a response
PIECE_BYTES = 256 * 1024
"""Larger request bodies are sent in pieces of this size, because asyncio copies what the socket
cannot take at once."""
PROXY_ERRORS = {
    413: "too_large",
    502: "unavailable",
    503: "unavailable",
    504: "deadline_exceeded",
}
"""Types of errors that come from a proxy in front of the service, without a type. Any other status
is an http_error."""
KEPT_BYTES = 2**28
LARGEST_BLOCK_BYTES = 2**25
"""The largest that every glibc accepts. Larger blocks are always returned to the system."""
ALLOCATOR_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
"""Environment variables by which the user has decided how glibc treats freed memory."""

Transport: TypeAlias = "HttpTransport | GrpcTransport"


def connect(url: str, token: str | None, timeout_seconds: float) -> Transport:
    """Opens no connection yet. Raises ValueError for a URL or token that cannot be used."""
    scheme = urlsplit(url).scheme
    if scheme not in ("http", "https", "grpc", "grpcs"):
        raise ValueError(f"{url!r}: the scheme must be http, https, grpc or grpcs")
    if token and not (token.isascii() and token.isprintable()):
        raise ValueError("the token has a line break or another character that no header can carry")
    keep_freed_memory()
    if scheme in ("http", "https"):
        return HttpTransport(url, token, timeout_seconds)
    # Only here, because the EC connector, in vLLM's environment, needs only HTTP.
    from encoder_service.client.grpc_transport import GrpcTransport

    return GrpcTransport(url, token, timeout_seconds)


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory of this process for the next response: up to KEPT_BYTES of the
    main thread's, and up to 64 MiB of each other arena.

    By default glibc returns large blocks to the system at once, and faulting them in again takes
    longer than receiving rows. Does nothing with another C library, or if the environment has one
    of ALLOCATOR_SETTINGS.
    """
    if any(name in os.environ for name in ALLOCATOR_SETTINGS):
        return
    with suppress(AttributeError, OSError, TypeError):  # no mallopt, or no CDLL(None)
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, LARGEST_BLOCK_BYTES)  # M_MMAP_THRESHOLD
        mallopt(-1, KEPT_BYTES)  # M_TRIM_THRESHOLD


class HttpTransport:
    """Sends msgpack and receives safetensors over HTTP connections that are kept alive.

    Every call raises ServiceError, also if nothing answers. `encode`, `plan` and `fetch` return
    response documents, `model` returns the model card. GrpcTransport has the same methods.
    """

    def __init__(self, url: str, token: str | None, timeout_seconds: float) -> None:
        """Raises ValueError. A name and password in the URL are sent instead of the token."""
        address = URL(url)
        if not address.host:
            raise ValueError(f"{url!r}: the host is missing")
        self.url = str(address.with_user(None).with_query(None).with_fragment(None)).rstrip("/")
        self.proxy = environment_proxy(address)
        self.timeout_seconds = timeout_seconds
        self.headers = {"authorization": f"Bearer {token}"} if token else {}
        if address.user or address.password:
            pair = f"{address.user or ''}:{address.password or ''}"
            self.headers = {"authorization": f"Basic {b64encode(pair.encode()).decode()}"}
        self.session: aiohttp.ClientSession | None = None

    async def encode(self, items: list[RequestItem], options: dict[str, Any]) -> Document:
        return await self.document("POST", "/v1/encode", packed(items, options))

    async def plan(self, items: list[RequestItem], options: dict[str, Any]) -> Document:
        return await self.document("POST", "/v1/plan", packed(items, options), JSON)

    async def embed(self, body: Document) -> Document:
        sent = json.dumps(body).encode()
        return await self.document("POST", "/v1/embeddings", sent, JSON, JSON)

    async def fetch(self, reference: str) -> Document:
        return await self.document("GET", path_of(reference))

    async def place(self, reference: str) -> Document:
        """Where the rows of an id are served: see actors/rows."""
        return await self.document("GET", path_of(reference) + "/place", accept=JSON)

    async def release(self, reference: str) -> None:
        await self.request("DELETE", path_of(reference))

    async def model(self) -> Document:
        return await self.document("GET", "/v1/model")

    async def ready(self) -> bool:
        try:
            await self.request("GET", "/readyz")
        except ServiceError:  # also 404, from a proxy while the service is being deployed
            return False
        return True

    async def close(self) -> None:
        if self.session is not None:
            await self.session.close()

    async def document(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        accept: str = SAFETENSORS,
        content_type: str = MSGPACK,
    ) -> Document:
        document: Document = await self.request(
            method, path, body, self.read_document, accept, content_type
        )
        return document

    async def read_document(self, response: aiohttp.ClientResponse) -> Document:
        if response.content_type == SAFETENSORS:
            return await read_embeddings(response.content, Takeover(response, self.timeout_seconds))
        return read_json(await response.read())

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        read: Callable[[aiohttp.ClientResponse], Awaitable[Any]] = aiohttp.ClientResponse.read,
        accept: str = SAFETENSORS,
        content_type: str = MSGPACK,
    ) -> Any:
        """Returns what `read` makes of a 2xx response. Raises ServiceError for any other."""
        if self.session is None:
            self.session = self.open_session()
        content: dict[str, Any] = {"headers": {"accept": accept}}
        if body:
            content["headers"] |= {"content-type": content_type, "content-length": str(len(body))}
            content["data"] = pieces(body) if len(body) > PIECE_BYTES else body
        try:
            async with self.session.request(
                method, URL(self.url + path, encoded=True), allow_redirects=False, **content
            ) as response:
                if 200 <= response.status < 300:
                    return await read(response)
                raise http_error(response, await response.read())
        except WireError as error:
            raise ServiceError("invalid_response", str(error), response.status) from None
        except TimeoutError as error:
            raise ServiceError("deadline_exceeded", f"no answer in time: {error!r}") from None
        except (aiohttp.ClientError, UnicodeError) as error:  # UnicodeError: not a host name
            reason = f"{self.url}: {unreachable(error)}"
            raise ServiceError("unavailable", reason, retryable=True) from None

    def open_session(self) -> aiohttp.ClientSession:
        limit = self.timeout_seconds
        return aiohttp.ClientSession(
            connector=CleanConnector(limit=0, keepalive_timeout=IDLE_SECONDS),
            headers=self.headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            # For `connect` and for each `sock_read`. AsyncClient bounds the call as a whole.
            timeout=aiohttp.ClientTimeout(None, connect=limit, sock_read=limit, ceil_threshold=1e9),
            proxy=self.proxy,
            max_line_size=HEAD_BYTES,
            max_field_size=HEAD_BYTES,
        )


class CleanConnector(aiohttp.TCPConnector):
    """Drops idle connections that have received unsolicited bytes.

    aiohttp 3.14 would take these for the response to the next request (its issue 13656).
    """

    async def connect(self, *args: Any, **kwargs: Any) -> aiohttp.connector.Connection:
        while True:
            connection = await super().connect(*args, **kwargs)
            if connection.protocol is None or not connection.protocol.should_close:
                return connection
            connection.close()


def unreachable(error: Exception) -> str:
    """Why there was no response. Not the error's repr, which shows the request's headers."""
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    if isinstance(error, aiohttp.ClientConnectorSSLError):
        return f"no TLS connection: is it an http:// address? ({reason})"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"no connection: is the service running there? ({error.os_error})"
    if isinstance(error, aiohttp.ClientResponseError):
        return f"the port does not speak HTTP: is it the gRPC port (grpc://HOST:PORT)? ({reason})"
    return f"the connection failed ({reason})"


def packed(items: list[RequestItem], options: dict[str, Any]) -> bytes:
    """Raises ServiceError for values that msgpack cannot hold."""
    documents = [item.document() for item in items]
    try:
        found: bytes = msgpack.packb({"items": documents, "options": options})
    except (OverflowError, TypeError):
        for index, document in enumerate(documents):
            check_each(document, f"items[{index}]", lambda _, value: msgpack.packb(value))
        check_each(options, "options", lambda _, value: msgpack.packb(value))
        raise
    return found


async def pieces(body: bytes) -> AsyncIterator[memoryview]:
    """Yields a request body. aiohttp waits after each piece until the socket has taken it."""
    view = memoryview(body)
    for start in range(0, len(view), PIECE_BYTES):
        yield view[start : start + PIECE_BYTES]


def http_error(response: aiohttp.ClientResponse, body: bytes) -> ServiceError:
    status, wait = response.status, response.headers.get("retry-after", "")
    try:
        document = json.loads(body)["error"]
        if not isinstance(document, dict):
            raise TypeError
    except (ValueError, KeyError, TypeError):  # from a proxy in front of the service
        document = {
            "type": PROXY_ERRORS.get(status, "http_error"),
            "message": f"{status} {body[:200].decode(errors='replace')}",
            "retryable": status in (429, 502, 503),
        }
    return service_error(document, status, float(wait) if wait.isdecimal() else None)


def path_of(reference: str) -> str:
    if not isinstance(reference, str):
        raise TypeError(f"needs an id (`.reference`), not {type(reference).__name__}")
    if not reference:
        raise ValueError("the id is empty: ask for one with `reference=True`")
    return f"/v1/embeddings/{quote(reference, safe='')}"


def environment_proxy(url: URL) -> URL | None:
    """The environment's proxy for a URL, none for addresses of this machine. Raises ValueError if
    it is not an HTTP proxy.

    aiohttp's own trust_env ignores all_proxy, and would send credentials from ~/.netrc.
    """
    if url.host in ("localhost", "127.0.0.1", "::1"):
        return None
    proxies = getproxies()
    found = proxies.get(url.scheme) or proxies.get("all")
    if not found or proxy_bypass(url.host or ""):
        return None
    proxy = URL(found if "://" in found else f"http://{found}")
    if proxy.scheme not in ("http", "https"):
        raise ValueError(
            f"the environment sets a {proxy.scheme} proxy, which is not supported: set an http "
            f"proxy, or add {url.host} to no_proxy"
        )
    return proxy
