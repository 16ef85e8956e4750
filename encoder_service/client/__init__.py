"""What a user imports. Needs neither torch nor Ray, router or actors."""

from encoder_service.client.async_ import AsyncClient
from encoder_service.client.dataset import DatasetOptions, Written
from encoder_service.client.embedding import Embedding, ServiceError
from encoder_service.client.samples import Frames, Samples, Source
from encoder_service.client.sync import Client

__all__ = [
    "AsyncClient",
    "Client",
    "DatasetOptions",
    "Embedding",
    "Frames",
    "Samples",
    "ServiceError",
    "Source",
    "Written",
]
