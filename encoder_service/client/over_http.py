"""A client's calls over HTTP: msgpack both ways."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import httpx
import msgpack

from encoder_service.client.connections import direct
from encoder_service.client.embedding import ServiceError, service_error
from encoder_service.wire.documents import RequestItem, parse_response
from encoder_service.wire.formats import MSGPACK, Document, WireError


class HttpTransport:
    """Over httpx, with msgpack; connections are kept and used again."""

    def __init__(
        self,
        url: str,
        token: str | None,
        timeout_seconds: float,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        transport = transport or direct(url)
        self.client = httpx.AsyncClient(
            base_url=url,
            headers={"authorization": f"Bearer {token}"} if token else {},
            timeout=timeout_seconds,
            limits=httpx.Limits(max_connections=None),
            transport=transport,
        )
        # Ours answers once, without redirects or cookies: what else httpx does takes as long.
        self.send = transport.handle_async_request if transport else self.client.send

    async def encode(self, items: list[RequestItem], options: dict[str, Any]) -> Document:
        """POST /v1/encode."""
        body = msgpack.packb({"items": [item.document() for item in items], "options": options})
        headers = {"content-type": MSGPACK, "accept": MSGPACK}
        return await self.document("POST", "/v1/encode", content=body, headers=headers)

    async def fetch(self, reference: str) -> Document:
        """GET /v1/embeddings/{reference}."""
        return await self.document("GET", path_of(reference), headers={"accept": MSGPACK})

    async def release(self, reference: str) -> None:
        """DELETE /v1/embeddings/{reference}."""
        await self.request("DELETE", path_of(reference))

    async def model(self) -> Document:
        """GET /v1/model."""
        _, body = await self.request("GET", "/v1/model")
        document: Document = json.loads(body)
        return document

    async def ready(self) -> bool:
        """GET /readyz."""
        try:
            await self.request("GET", "/readyz")
        except ServiceError:  # also 404, of a proxy while the service is being deployed
            return False
        return True

    async def close(self) -> None:
        """See Transport."""
        await self.client.aclose()

    async def document(self, method: str, path: str, **content: Any) -> Document:
        """The document of a response that is 2xx."""
        response, body = await self.request(method, path, **content)
        try:
            return parse_response(body, response.headers.get("content-type", ""))
        except WireError as error:
            raise ServiceError("invalid_response", str(error), response.status_code) from error

    async def request(self, method: str, path: str, **content: Any) -> tuple[httpx.Response, bytes]:
        """A response that is 2xx, and its body."""
        try:
            response = await self.send(self.client.build_request(method, path, **content))
            pieces = [piece async for piece in response.aiter_bytes()]
        except httpx.TimeoutException as error:
            raise ServiceError("deadline_exceeded", f"no answer in time: {error!r}") from error
        except httpx.RequestError as error:  # also a body that is not the gzip that it says
            url = self.client.base_url
            raise ServiceError("unavailable", f"{url}: {error!r}", retryable=True) from error
        # A single piece, which may be many megabytes, would be copied by joining.
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if response.is_success:
            return response, body
        try:
            document = json.loads(body)["error"]
        except (ValueError, KeyError, TypeError):  # a proxy in between answered
            document = {
                "type": "unavailable" if response.status_code in (502, 503) else "http_error",
                "message": f"{response.status_code} {body[:200].decode(errors='replace')}",
                "retryable": response.status_code in (429, 502, 503),
            }
        raise service_error(document, response.status_code, seconds(response.headers))


def path_of(reference: str) -> str:
    """Where an embedding is kept. Raises TypeError, ValueError."""
    if not isinstance(reference, str):
        raise TypeError(f"an id is asked for (`.reference`), not {type(reference).__name__}")
    if not reference:
        raise ValueError("the id is empty: ask for one with `reference=True`")
    return f"/v1/embeddings/{quote(reference, safe='')}"


def seconds(headers: httpx.Headers) -> float | None:
    """Retry-After, if it is a number of seconds."""
    value = headers.get("retry-after", "")
    return float(value) if value.isdecimal() else None
