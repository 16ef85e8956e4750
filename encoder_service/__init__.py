"""Encoder Service: the vision encoders of vision-language models as a separate service."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from encoder_service.client import (
        AsyncClient,
        Client,
        Embedding,
        Frames,
        Input,
        Plan,
        ServiceError,
        Text,
        Video,
    )

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "Client",
    "Embedding",
    "Frames",
    "Input",
    "Plan",
    "ServiceError",
    "Text",
    "Video",
]


def __getattr__(name: str) -> Any:
    """Imports the client's names on first use, because the service itself never needs them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from encoder_service import client

    return getattr(client, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
