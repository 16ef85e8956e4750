"""The proxy with `--by-id`: what vLLM gets in place of images, and when ids are released."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import pytest
import torch

from actors.errors import InvalidMedia
from actors.pipeline import NO_BYTES
from actors.types import Answer, Dtype, Media
from encoder_service.api import answer as answers
from tests.images import jpeg
from tests.unit.front_door import Fleet, zeros
from tests.unit.proxied import Story, Vllm, chat, image, told

PATH = "/v1/chat/completions"
SMALL = jpeg(64, 64)
CHAT = chat(image(SMALL), image(jpeg(128, 64)))


class Keeping(Fleet):
    """Keeps embeddings until they are released, and fails images of the size `wrong`."""

    def __init__(self, wrong: tuple[int, int, int] = (0, 0, 0), extra_rows: int = 0) -> None:
        super().__init__()
        self.wrong = wrong
        self.extra_rows = extra_rows
        self.kept: list[str] = []
        self.made = 0

    async def encode(
        self, media: list[Media], dtype: Dtype, timeout_seconds: float, *, reference: bool
    ) -> list[Answer]:
        assert reference
        await super().encode(media, dtype, timeout_seconds, reference=reference)
        return [self.keep(one) for one in media]

    def keep(self, media: Media) -> Answer:
        if media.plan.grid_thw == self.wrong:
            return InvalidMedia("torn")
        self.made += 1
        self.kept.append(f"replica.content{self.made}.owner")
        answer = zeros(media)
        shape = (answer.shape[0] + self.extra_rows, answer.shape[1])
        return replace(answer, data=NO_BYTES, shape=shape, reference=self.kept[-1])

    async def release(self, reference: str) -> None:
        self.kept.remove(reference)

    async def emptied(self) -> None:
        async with asyncio.timeout(20):
            while self.kept:
                await asyncio.sleep(0.01)


told_by_id = partial(told, by_id=True)


def test_ids_and_grids_arrive_in_place_of_images() -> None:
    fleet = Keeping()

    async def story(client: httpx.AsyncClient, vllm: Vllm) -> None:
        body = chat(image(jpeg(640, 640)), image(SMALL)) | {
            "mm_processor_kwargs": {"max_pixels": 65536},
            "media_io_kwargs": {},
            "temperature": 0.5,
        }
        body["messages"][1]["content"][1]["uuid"] = "mine"
        answer = await client.post(PATH, json=body)
        assert answer.status_code == 200
        got = json.loads(vllm.bodies[0])
        *parts, text = got.pop("messages")[1]["content"]
        assert [part["uuid"] for part in parts] == ["replica.content1", "replica.content2"]
        assert [grid(part) for part in parts] == [[1, 16, 16], [1, 4, 4]]
        assert text == {"type": "text", "text": "What?"}
        # vLLM would replace the ids for the others.
        assert got == {"model": "m", "temperature": 0.5}
        await fleet.emptied()
        assert fleet.made == 2

    told_by_id(story, fleet)


def grid(part: dict[str, Any]) -> list[int]:
    (saved,) = part["image_embeds"].values()
    found: list[int] = torch.load(io.BytesIO(base64.b64decode(saved)), weights_only=True).tolist()
    return found


def test_rows_do_not_count_as_buffered() -> None:
    """By value, this answer is a 429."""

    async def story(client: httpx.AsyncClient, vllm: Vllm) -> None:
        answer = await client.post(PATH, json=chat(image(jpeg(640, 640))))
        assert answer.status_code == 200

    told_by_id(story, Keeping(), max_body_bytes=200_000, max_buffered_bytes=200_000)


@asynccontextmanager
async def streaming(client: httpx.AsyncClient, **more: Any) -> AsyncIterator[AsyncIterator[bytes]]:
    """The rest of a response, after its first piece."""
    body = CHAT | {"stream": True} | more
    async with client.stream("POST", PATH, json=body) as answer:
        pieces = answer.aiter_raw()
        assert await anext(pieces) == b"data: 1\n\n"
        yield pieces


def test_ids_are_released_at_the_end_of_a_stream() -> None:
    fleet = Keeping()

    async def story(client: httpx.AsyncClient, vllm: Vllm) -> None:
        async with streaming(client) as rest:
            await asyncio.sleep(0.1)
            assert len(fleet.kept) == 2
            vllm.go_on.set()
            assert [piece async for piece in rest] == [b"data: [DONE]\n\n"]
        await fleet.emptied()

    told_by_id(story, fleet)


def test_ids_are_released_when_a_stream_fails() -> None:
    fleet = Keeping()

    async def story(client: httpx.AsyncClient, vllm: Vllm) -> None:
        async with streaming(client, model="failing") as rest:
            vllm.go_on.set()
            with pytest.raises(httpx.RemoteProtocolError):
                await anext(rest)
        await fleet.emptied()

    told_by_id(story, fleet)


def test_ids_are_released_when_the_client_leaves_a_stream() -> None:
    fleet = Keeping()

    async def story(client: httpx.AsyncClient, vllm: Vllm) -> None:
        async with streaming(client):
            assert len(fleet.kept) == 2
        await fleet.emptied()
        await asyncio.wait_for(vllm.ended.wait(), 20)

    told_by_id(story, fleet)


def test_ids_are_released_when_the_client_leaves_before_the_answer() -> None:
    fleet = Keeping()

    async def story(client: httpx.AsyncClient, vllm: Vllm) -> None:
        call = asyncio.create_task(client.post(PATH, json=CHAT | {"slow": True}))
        while not vllm.bodies:
            await asyncio.sleep(0.01)
        assert len(fleet.kept) == 2
        call.cancel()
        await fleet.emptied()
        await asyncio.wait_for(vllm.ended.wait(), 20)

    told_by_id(story, fleet)


@pytest.mark.parametrize(
    ("upstream", "model", "status"), [("", "missing", 404), ("http://127.0.0.1:9", "m", 503)]
)
def test_ids_are_released_after_an_error_of_the_server(
    upstream: str, model: str, status: int
) -> None:
    fleet = Keeping()

    async def story(client: httpx.AsyncClient, vllm: Vllm) -> None:
        answer = await client.post(PATH, json=CHAT | {"model": model})
        assert answer.status_code == status
        await fleet.emptied()
        assert fleet.made == 2

    told_by_id(story, fleet, upstream)


@pytest.mark.parametrize(
    ("fleet", "made", "words"),
    [
        (Keeping(wrong=(1, 4, 4)), 1, "messages[1].content[0]: torn"),
        (Keeping(extra_rows=1), 2, "messages[1].content[0]: a grid"),
    ],
)
def test_ids_are_released_when_an_image_cannot_be_taken(
    fleet: Keeping, made: int, words: str
) -> None:
    """The first image fails in the encoder; or vLLM could not take it."""

    async def story(client: httpx.AsyncClient, vllm: Vllm) -> None:
        answer = await client.post(PATH, json=CHAT)
        assert not answer.is_success
        assert words in answer.text
        assert not vllm.bodies
        await fleet.emptied()
        assert fleet.made == made

    told_by_id(story, fleet)


def refused(status: int, words: str) -> Story:
    async def story(client: httpx.AsyncClient, vllm: Vllm) -> None:
        answer = await client.post(PATH, json=CHAT)
        assert answer.status_code == status
        assert words in answer.json()["error"]["message"]
        assert not vllm.bodies
        assert (await client.post(PATH, json=chat())).is_success

    return story


def test_a_family_without_ids_in_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, head = Keeping(), answers.head
    monkeypatch.setattr(answers, "head", lambda spec: head(spec) | {"family": "llava"})
    told_by_id(refused(400, "no ids of the family 'llava'"), fleet)
    assert not fleet.calls


def test_ids_that_could_expire_in_vllms_queue_are_refused() -> None:
    fleet = Keeping()
    told_by_id(refused(503, "references.ttl_seconds"), fleet, ttl_seconds=60)
    assert not fleet.calls
