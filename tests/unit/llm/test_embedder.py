"""How often the language model asks for embeddings when routers and encoders die."""

from __future__ import annotations

import asyncio
from typing import Any, Self, cast

import pytest
from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle

from actors.errors import EmbeddingLost, InvalidMedia, ServiceError
from actors.telemetry.tracing import NOBODY
from actors.types import Answer, Dtype, Media
from encoder_service.api.errors import AtItem
from encoder_service.intake.limits import Deadline
from encoder_service.llm.chat import Embedder
from router.here import ATTEMPTS
from tests.unit.fleet import embedding, item, right

MEDIA = [item(number) for number in range(2)]


class Routers:
    """Each call plays the next of `ends`: an error of the call, of the second item, or none."""

    def __init__(self, *ends: RayActorError | ServiceError | None) -> None:
        self.ends = list(ends)
        self.asked: list[list[Media]] = []

    def options(self, **options: Any) -> Self:
        return self

    async def remote(
        self, media: list[Media], dtype: Dtype, timeout_seconds: float, **more: Any
    ) -> list[Answer]:
        self.asked.append(media)
        end = self.ends.pop(0)
        if isinstance(end, RayActorError):
            raise end
        return [end if end and one is MEDIA[1] else embedding(one, "a") for one in media]


def encode(routers: Routers) -> list[Answer]:
    embedder = Embedder(cast(DeploymentHandle, routers), "bfloat16")
    return list(asyncio.run(embedder.encode(MEDIA, Deadline(5), NOBODY)))


def test_a_router_that_is_lost_is_asked_again() -> None:
    routers = Routers(RayActorError(), None)
    assert right(MEDIA, encode(routers))
    assert routers.asked == [MEDIA, MEDIA]


def test_whatever_is_lost_there_are_so_many_attempts_in_all() -> None:
    lost = EmbeddingLost("its replica ended")
    routers = Routers(RayActorError(), *[lost] * (ATTEMPTS - 1))
    with pytest.raises(EmbeddingLost, match="its replica ended"):
        encode(routers)
    assert routers.asked == [MEDIA, MEDIA, [MEDIA[1]]]
    with pytest.raises(EmbeddingLost, match="the router was lost"):
        encode(Routers(*[RayActorError()] * ATTEMPTS))


def test_an_item_at_fault_is_named() -> None:
    with pytest.raises(AtItem) as refused:
        encode(Routers(InvalidMedia("not an image")))
    assert refused.value.item == 1
