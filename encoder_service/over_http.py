"""A client's calls over HTTP: msgpack both ways."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import httpx
import msgpack

from encoder_service.embedding import ServiceError, service_error
from encoder_service.formats import MSGPACK, Document, WireError
from encoder_service.wire import RequestItem, parse_response


class HttpTransport:
    """Over httpx, with msgpack; connections are kept and used again."""

    def __init__(
        self,
        url: str,
        token: str | None,
        timeout_seconds: float,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.client = httpx.AsyncClient(
            base_url=url,
            headers={"authorization": f"Bearer {token}"} if token else {},
            timeout=timeout_seconds,
            limits=httpx.Limits(max_connections=None),
            transport=transport,
        )

    async def encode(self, items: list[RequestItem], options: dict[str, Any]) -> Document:
        """POST /v1/encode."""
        body = msgpack.packb({"items": [item.document() for item in items], "options": options})
        headers = {"content-type": MSGPACK, "accept": MSGPACK}
        return parsed(await self.request("POST", "/v1/encode", content=body, headers=headers))

    async def fetch(self, reference: str) -> Document:
        """GET /v1/embeddings/{reference}."""
        return parsed(await self.request("GET", path_of(reference), headers={"accept": MSGPACK}))

    async def release(self, reference: str) -> None:
        """DELETE /v1/embeddings/{reference}."""
        await self.request("DELETE", path_of(reference))

    async def model(self) -> Document:
        """GET /v1/model."""
        document: Document = (await self.request("GET", "/v1/model")).json()
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

    async def request(self, method: str, path: str, **content: Any) -> httpx.Response:
        """A response that is 2xx."""
        try:
            response = await self.client.request(method, path, **content)
        except httpx.TimeoutException as error:
            raise ServiceError("deadline_exceeded", f"no answer in time: {error!r}") from error
        except httpx.TransportError as error:
            url = self.client.base_url
            raise ServiceError("unavailable", f"{url}: {error!r}", retryable=True) from error
        if response.is_success:
            return response
        try:
            document = response.json()["error"]
        except (ValueError, KeyError, TypeError):  # a proxy in between answered
            document = {
                "type": "unavailable" if response.status_code in (502, 503) else "http_error",
                "message": f"{response.status_code} {response.text[:200]}",
                "retryable": response.status_code in (429, 502, 503),
            }
        raise service_error(document, response.status_code, seconds(response.headers))


def parsed(response: httpx.Response) -> Document:
    """The response document."""
    try:
        return parse_response(response.content, response.headers.get("content-type", ""))
    except WireError as error:
        raise ServiceError("invalid_response", str(error), response.status_code) from error


def path_of(reference: str) -> str:
    """Where an embedding is kept."""
    return f"/v1/embeddings/{quote(reference, safe='')}"


def seconds(headers: httpx.Headers) -> float | None:
    """Retry-After, if it is a number of seconds."""
    value = headers.get("retry-after", "")
    return float(value) if value.isdecimal() else None
