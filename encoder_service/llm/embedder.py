"""Embeddings for the language model, from the Router deployment by its handle."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ray.exceptions import RayTaskError
from ray.serve.handle import DeploymentHandle

from actors.errors import ServiceError, Unavailable
from actors.origin import Origin
from actors.types import Answer, Dtype, Embedding, Media
from encoder_service.deadline import Deadline
from encoder_service.errors import AtItem
from router.here import encode_here
from router.router import LOST, brief

ATTEMPTS = 3
"""How many routers may be lost under one request. Encoders that are lost are the router's care."""


class Embedder:
    """Asks for embeddings in the language model's own dtype."""

    def __init__(self, router: DeploymentHandle, dtype: Dtype) -> None:
        self.router = router.options(method_name="encode", _by_reference=True)
        self.dtype: Dtype = dtype

    async def encode(
        self, media: Sequence[Media], deadline: Deadline, origin: Origin
    ) -> list[Embedding]:
        """In the order of `media`, the data in this process.

        Raises AtItem for the first item that failed, ServiceError for the request as a whole.
        """
        found: list[Embedding] = []
        for index, answer in enumerate(await self._ask(media, deadline, origin) if media else []):
            if isinstance(answer, ServiceError):
                raise AtItem(index, answer)
            found.append(answer)
        return found

    async def _ask(
        self, media: Sequence[Media], deadline: Deadline, origin: Origin
    ) -> list[Answer]:
        call = partial(self.router.remote, origin=origin)
        failure: Exception = Unavailable("never asked")
        for _ in range(ATTEMPTS):
            try:
                work = encode_here(call, media, self.dtype, deadline.left())
                return await deadline.keep(work)
            except LOST as error:
                failure = error
            except RayTaskError as error:
                if isinstance(error.cause, ServiceError):
                    raise error.cause from None
                raise
        raise Unavailable(f"the router was lost ({brief(failure)}): send the request again")
