"""Encoder Service: vision encoders apart from the language models that use them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from encoder_service.client import AsyncClient, Client, Embedding, Frames, ServiceError

__version__ = "0.1.0"

__all__ = ["AsyncClient", "Client", "Embedding", "Frames", "ServiceError"]


def __getattr__(name: str) -> Any:
    """The client's names, loaded when asked for: the service's own processes never do."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from encoder_service.client import sync as client

    return getattr(client, name)


def __dir__() -> list[str]:
    """Also the names that are not loaded yet."""
    return sorted({*globals(), *__all__})
