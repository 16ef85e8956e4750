"""How a client reaches a service: the scheme of a URL names the transport.

gRPC is imported where it is asked for: within vLLM, the EC connector has only HTTP.
"""

from __future__ import annotations

from typing import Any, Protocol
from urllib.parse import urlsplit

from encoder_service.client.over_http import HttpTransport
from encoder_service.wire.documents import RequestItem
from encoder_service.wire.formats import Document

GRPC_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # By default up to two minutes, in which every call fails with what was wrong before.
    ("grpc.max_reconnect_backoff_ms", 2000),
]


class Transport(Protocol):
    """One service, reached in one way. Raises ServiceError, also when there is no answer."""

    async def encode(self, items: list[RequestItem], options: dict[str, Any]) -> Document:
        """The response document."""

    async def fetch(self, reference: str) -> Document:
        """The response document of the one item that is kept under an id."""

    async def release(self, reference: str) -> None:
        """Lets go of it."""

    async def model(self) -> Document:
        """What is served."""

    async def ready(self) -> bool:
        """Whether an encoder is."""

    async def close(self) -> None:
        """Gives the connections back."""


def connect(url: str, token: str | None, timeout_seconds: float) -> Transport:
    """The transport that the scheme of a URL names. Raises ValueError."""
    scheme, address = urlsplit(url).scheme, urlsplit(url).netloc
    if scheme in ("http", "https"):
        return HttpTransport(url, token, timeout_seconds)
    if scheme not in ("grpc", "grpcs"):
        raise ValueError(f"{url!r}: the scheme must be http, https, grpc or grpcs")
    import grpc

    from encoder_service.client.over_grpc import GrpcTransport

    if scheme == "grpc":
        channel = grpc.aio.insecure_channel(address, GRPC_OPTIONS)
    else:
        channel = grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(), GRPC_OPTIONS)
    return GrpcTransport(channel, token, timeout_seconds)
