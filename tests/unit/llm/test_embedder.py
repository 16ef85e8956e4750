"""How often the language model asks for embeddings when routers and encoders die, and what it gets
with `llm.local_encoder`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle

from actors.errors import (
    DeadlineExceeded,
    EmbeddingLost,
    InvalidMedia,
    Overloaded,
    ServiceError,
    TooLarge,
    Unavailable,
)
from actors.families.registry import read
from actors.media.decoder import Decoder
from actors.media.image import prepare
from actors.media.patchify import patchifier_of
from actors.options import ModelOptions, PreprocessOptions
from actors.telemetry.tracing import NOBODY
from actors.types import Answer, Dtype, Embedding, Item, Kind, Media, ProcessorKwargs
from encoder_service.api.errors import AtItem
from encoder_service.config import LimitOptions
from encoder_service.intake.limits import Deadline
from encoder_service.intake.media import probe
from encoder_service.llm.chat import ChatMetrics
from encoder_service.llm.embedder import Embedder, Input, LocalEmbedder, Patches
from router.here import ATTEMPTS
from tests.images import jpeg
from tests.unit.fleet import embedding, item, right
from tests.videos import video

MEDIA = [item(number) for number in range(2)]


class Routers:
    """Each call plays the next of `ends`: an error of the call, of the second item, or none."""

    def __init__(self, *ends: RayActorError | ServiceError | None) -> None:
        self.ends = list(ends)
        self.asked: list[list[Media]] = []
        self.kept: list[bool] = []
        """Whether each call asked for ids."""
        self.released: list[str] = []

    def options(self, *, method_name: str, **options: Any) -> Any:
        return self if method_name == "encode" else Releases(self.released)

    async def remote(
        self, media: list[Media], dtype: Dtype, timeout_seconds: float, *, keep: bool, origin: Any
    ) -> list[Answer]:
        self.asked.append(media)
        self.kept.append(keep)
        end = self.ends.pop(0)
        if isinstance(end, RayActorError) or type(end) is Unavailable:
            raise end
        return [
            end
            if end and one is MEDIA[1]
            else replace(embedding(one, "a"), reference=keep * f"a.{one.digest}.b")
            for one in media
        ]


class Releases:
    """The same routers, which end just then."""

    def __init__(self, released: list[str]) -> None:
        self.released = released

    async def remote(self, references: list[str]) -> None:
        self.released += references
        raise RayActorError()


def encode(routers: Routers) -> list[Answer]:
    embedder = Embedder(cast(DeploymentHandle, routers), "bfloat16")
    found = asyncio.run(embedder.encode(MEDIA, Deadline(5), NOBODY))
    return [one for one in found if isinstance(one, Embedding)]


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


def embedded(routers: Routers, *, times: int = 1) -> list[Sequence[Input]]:
    async def run() -> list[Sequence[Input]]:
        embedder = Embedder(cast(DeploymentHandle, routers), "bfloat16")
        try:
            return [
                await embedder.encode(MEDIA, Deadline(5), NOBODY, keep=True) for _ in range(times)
            ]
        finally:
            await asyncio.gather(*embedder.releasing)

    return asyncio.run(run())


def test_rows_that_encoders_have_no_room_for_are_taken_by_value() -> None:
    routers = Routers(Overloaded("no room"), None, None)
    first, second = embedded(routers, times=2)  # the second asks for no ids: they have just failed
    assert routers.asked == [MEDIA, [MEDIA[1]], MEDIA]
    assert routers.kept == [True, False, False]
    assert [bool(one.reference) for one in (*first, *second)] == [True, False, False, False]
    assert not routers.released


def test_rows_that_are_too_large_to_be_kept_are_no_reason_to_ask_for_no_ids() -> None:
    routers = Routers(TooLarge("over references.max_bytes"), None, None)
    first, second = embedded(routers, times=2)
    assert routers.kept == [True, False, True]
    assert [bool(one.reference) for one in (*first, *second)] == [True, False, True, True]


def test_ids_are_released_if_the_rest_cannot_be_had_by_value() -> None:
    routers = Routers(Overloaded("no room"), Unavailable("no router"))
    with pytest.raises(Unavailable):
        embedded(routers)
    assert routers.released == [f"a.{MEDIA[0].digest}.b"]


def test_an_item_at_fault_costs_nobody_else_their_ids() -> None:
    routers = Routers(TooLarge("a bomb"), TooLarge("a bomb"), None)

    async def run() -> None:
        embedder = Embedder(cast(DeploymentHandle, routers), "bfloat16")
        with pytest.raises(AtItem):
            await embedder.encode(MEDIA, Deadline(5), NOBODY, keep=True)
        assert all(
            one.reference for one in await embedder.encode(MEDIA, Deadline(5), NOBODY, keep=True)
        )
        await asyncio.gather(*embedder.releasing)

    asyncio.run(run())
    assert routers.released == [f"a.{MEDIA[0].digest}.b"]


@pytest.mark.parametrize("error", [InvalidMedia("torn"), Overloaded("busy")])
def test_ids_of_a_request_that_fails_are_released(error: ServiceError) -> None:
    routers = Routers(error, error)
    with pytest.raises(AtItem):
        embedded(routers)
    assert routers.released == [f"a.{MEDIA[0].digest}.b"]


def test_ids_of_an_attempt_are_released_if_the_next_one_fails() -> None:
    routers = Routers(EmbeddingLost("its replica ended"), Unavailable("no router"))
    with pytest.raises(Unavailable):
        embedded(routers)
    assert routers.released == [f"a.{MEDIA[0].digest}.b"]


def test_a_damaged_item_is_named_while_others_are_decoded() -> None:
    jobs: list[Future[Item]] = [Future() for _ in MEDIA]
    decoder = cast(Decoder, SimpleNamespace(submit=lambda media: jobs[MEDIA.index(media)]))
    embedder = LocalEmbedder(cast(DeploymentHandle, Routers()), "bfloat16", decoder)
    jobs[1].set_exception(InvalidMedia("torn"))
    with pytest.raises(AtItem) as refused:
        asyncio.run(embedder.encode(MEDIA, Deadline(60), NOBODY))
    assert (refused.value.item, jobs[0].cancelled()) == (1, True)
    jobs[:] = [Future() for _ in MEDIA]
    with pytest.raises(DeadlineExceeded):
        asyncio.run(embedder.encode(MEDIA, Deadline(0.01), NOBODY))
    assert all(job.cancelled() for job in jobs)


@pytest.mark.parametrize("processes", [0, 1])
def test_items_are_decoded_for_the_engine_inside_vllm(processes: int) -> None:
    model, metrics = ModelOptions(id="qwen3vl-tiny", load_format="dummy"), ChatMetrics()
    options = PreprocessOptions(processes=processes, shared_bytes=2**20)
    decoder, patchifier = Decoder(model, options, metrics), patchifier_of(read(model))

    def probed(data: bytes, kind: Kind = "image", **kwargs: int) -> Media:
        return probe(data, kind, patchifier.spec, LimitOptions(), kwargs=ProcessorKwargs(**kwargs))

    def encode(*media: Media) -> Sequence[Input]:
        routers = cast(DeploymentHandle, Routers())  # which are not asked
        embedder = LocalEmbedder(routers, "bfloat16", decoder)
        return asyncio.run(embedder.encode(media, Deadline(60), NOBODY, keep=True))

    image, clip = probed(jpeg(301, 503), max_pixels=40_000), probed(video(4), "video")
    media = [image, clip, *[probed(jpeg(320, 480))] * 3]
    try:
        for _ in range(3):  # more than shared_bytes holds
            for one, made in zip(media, encode(*media), strict=True):
                assert isinstance(made, Patches)
                expected = prepare(patchifier, one)
                frames = [expected.patches, expected.later][: 2 if one.clip else 1]
                assert np.array_equal(made.data, np.stack(frames))
        assert "encoder_chat_preprocessed_items_total 15.0" in metrics.text()
        torn, short = (replace(image, data=image.data[:size]) for size in (600, 900))
        with pytest.raises(AtItem) as refused:
            encode(clip, torn, image, short)
        assert (refused.value.item, type(refused.value.error)) == (1, InvalidMedia)
        assert encode() == []
    finally:
        decoder.close()
    with pytest.raises(Unavailable):  # no image is at fault
        encode(image)
