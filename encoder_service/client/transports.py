"""How a client reaches a service over HTTP. The scheme of the URL chooses HTTP or gRPC."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import quote, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import msgpack
from yarl import URL

from encoder_service.client.items import ServiceError, service_error
from encoder_service.wire.documents import RequestItem
from encoder_service.wire.formats import MSGPACK, Document, WireError, read_json, read_msgpack

if TYPE_CHECKING:
    from encoder_service.client.grpc_transport import GrpcTransport

IDLE_SECONDS = 5.0
"""Connections idle for longer are closed: the server may have closed its end by then."""
HEAD_BYTES = 64 * 1024  # longest line and header value of a response
PIECE_BYTES = 256 * 1024
"""Larger request bodies are sent in pieces: asyncio copies what the socket cannot take at once."""
MOST_BYTES = 2**31
"""Of a body that is read into one buffer, whose size a header says before any of it has come."""


Transport: TypeAlias = "HttpTransport | GrpcTransport"


def connect(url: str, token: str | None, timeout_seconds: float) -> Transport:
    """Opens no connection yet. Raises ValueError for a URL or token that cannot be used."""
    scheme = urlsplit(url).scheme
    if scheme not in ("http", "https", "grpc", "grpcs"):
        raise ValueError(f"{url!r}: the scheme must be http, https, grpc or grpcs")
    if token and not (token.isascii() and token.isprintable()):
        raise ValueError("the token has a line break or another character that no header can carry")
    if scheme in ("http", "https"):
        return HttpTransport(url, token, timeout_seconds)
    # Only here, because in vLLM's environment the EC connector needs HTTP alone.
    from encoder_service.client.grpc_transport import GrpcTransport

    return GrpcTransport(url, token, timeout_seconds)


class HttpTransport:
    """HTTP with msgpack both ways, over connections that are kept alive.

    Every call raises ServiceError, also when nothing answers. `encode` and `fetch` return response
    documents, `model` the model card. GrpcTransport has the same methods.
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
        body = msgpack.packb({"items": [item.document() for item in items], "options": options})
        return await self.document("POST", "/v1/encode", body)

    async def fetch(self, reference: str) -> Document:
        return await self.document("GET", path_of(reference))

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

    async def document(self, method: str, path: str, body: bytes = b"") -> Document:
        response, received = await self.request(method, path, body)
        read = read_msgpack if response.content_type == MSGPACK else read_json
        try:
            return read(received)
        except WireError as error:
            raise ServiceError("invalid_response", str(error), response.status) from error

    async def request(
        self, method: str, path: str, body: bytes = b""
    ) -> tuple[aiohttp.ClientResponse, bytes | bytearray]:
        """A 2xx response and its body; any other one is raised as ServiceError."""
        if self.session is None:
            self.session = self.open_session()
        content: dict[str, Any] = {"headers": {"accept": MSGPACK}}
        if body:
            content["headers"] |= {"content-type": MSGPACK, "content-length": str(len(body))}
            content["data"] = pieces(body) if len(body) > PIECE_BYTES else body
        try:
            async with self.session.request(
                method, URL(self.url + path, encoded=True), allow_redirects=False, **content
            ) as response:
                received = await body_of(response)
        except TimeoutError as error:
            raise ServiceError("deadline_exceeded", f"no answer in time: {error!r}") from error
        except (aiohttp.ClientError, UnicodeError) as error:  # UnicodeError: not a host name
            raise ServiceError("unavailable", f"{self.url}: {error!r}", retryable=True) from error
        if 200 <= response.status < 300:
            return response, received
        raise http_error(response, received)

    def open_session(self) -> aiohttp.ClientSession:
        limit = self.timeout_seconds
        return aiohttp.ClientSession(
            connector=CleanConnector(limit=0, keepalive_timeout=IDLE_SECONDS),
            headers=self.headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            # `connect` and `sock_read` each; AsyncClient bounds the call as a whole.
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


async def body_of(response: aiohttp.ClientResponse) -> bytes | bytearray:
    """The body, read into one buffer: `response.read()` joins pieces and so holds all bytes twice.

    Of 3.3 MB that takes 1.7 to 2.4 ms of CPU time instead of 9 to 10 on uvloop.
    """
    length = response.content_length
    if length is None or length > MOST_BYTES or "content-encoding" in response.headers:
        return await response.read()
    body, end = bytearray(length), 0
    async for piece in response.content.iter_any():
        body[end : end + len(piece)] = piece
        end += len(piece)
    return body


async def pieces(body: bytes) -> AsyncIterator[memoryview]:
    """A request body; aiohttp waits between the pieces until the socket has taken them."""
    view = memoryview(body)
    for start in range(0, len(view), PIECE_BYTES):
        yield view[start : start + PIECE_BYTES]


def http_error(response: aiohttp.ClientResponse, body: bytes | bytearray) -> ServiceError:
    status, wait = response.status, response.headers.get("retry-after", "")
    try:
        document = json.loads(body)["error"]
        if not isinstance(document, dict):
            raise TypeError
    except (ValueError, KeyError, TypeError):  # from a proxy in front of the service
        document = {
            "type": "unavailable" if status in (502, 503) else "http_error",
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
    """The proxy that the environment names for a URL. Raises ValueError if it is no HTTP proxy.

    aiohttp's own trust_env knows no all_proxy, and would send credentials from ~/.netrc.
    """
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
