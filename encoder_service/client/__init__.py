"""What a user imports. Needs neither torch nor Ray, and of actors only the row protocol."""

from encoder_service.client.client import AsyncClient, Client
from encoder_service.client.dataset import DatasetOptions, Samples, Written
from encoder_service.client.items import (
    Embedding,
    Frames,
    Input,
    Plan,
    ServiceError,
    Source,
    Text,
    Video,
)

__all__ = [
    "AsyncClient",
    "Client",
    "DatasetOptions",
    "Embedding",
    "Frames",
    "Input",
    "Plan",
    "Samples",
    "ServiceError",
    "Source",
    "Text",
    "Video",
    "Written",
]
