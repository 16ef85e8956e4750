"""Embeddings for the language model, from the Router deployment by its handle."""

from __future__ import annotations

from collections.abc import Sequence

from ray.exceptions import RayTaskError
from ray.serve.handle import DeploymentHandle

from actors.errors import EmbeddingLost, ServiceError
from actors.telemetry.request_context import Origin
from actors.types import Answer, Dtype, Embedding, Media
from encoder_service.api.deadline import Deadline
from encoder_service.api.errors import AtItem
from router.here import Reader, encode_here
from router.replicas.serve_fleet import LOST, brief


class Embedder:
    """Asks for embeddings in the language model's own dtype."""

    def __init__(
        self, router: DeploymentHandle, dtype: Dtype, reader: Reader | None = None
    ) -> None:
        """`reader`: has rows from the encoders' devices, where they are left there."""
        self.reader = reader
        self.router = router.options(method_name="encode", _by_reference=True)
        self.dtype: Dtype = dtype

    async def encode(
        self, media: Sequence[Media], deadline: Deadline, origin: Origin
    ) -> list[Embedding]:
        """In the order of `media`, the data in this process.

        Raises AtItem for the first item that failed, ServiceError for the request as a whole.
        """

        async def call(items: list[Media], dtype: Dtype, seconds: float) -> list[Answer]:
            return await self._call(items, dtype, seconds, origin)

        if not media:
            return []
        found: list[Embedding] = []
        work = encode_here(call, media, self.dtype, deadline.left(), self.reader)
        for index, answer in enumerate(await deadline.keep(work)):
            if isinstance(answer, EmbeddingLost):
                raise answer  # no item is at fault
            if isinstance(answer, ServiceError):
                raise AtItem(index, answer)
            found.append(answer)
        return found

    async def _call(
        self, media: list[Media], dtype: Dtype, timeout_seconds: float, origin: Origin
    ) -> list[Answer]:
        """One attempt. Items that are lost with their router are encode_here's to try again."""
        try:
            answers: list[Answer] = await self.router.remote(
                media, dtype, timeout_seconds, origin=origin
            )
        except LOST as error:
            lost = f"the router was lost ({brief(error)}): send the request again"
            return [EmbeddingLost(lost)] * len(media)
        except RayTaskError as error:
            if isinstance(error.cause, ServiceError):
                raise error.cause from None
            raise
        return answers
