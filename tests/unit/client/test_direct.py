"""Clients whose rows come from the encoders' own sockets: real front door, real server of rows."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from secrets import token_urlsafe
from time import sleep
from typing import Any

import numpy as np
import pytest
import torch

from actors.options import ReferenceOptions
from actors.pipeline import NO_BYTES
from actors.rows import reader
from actors.rows.memory import BlockMemory
from actors.rows.protocol import RowsPlace
from actors.rows.reader import RowsReader
from actors.store.kept import Kept
from actors.types import Answer, Dtype, Embedding, Media
from encoder_service.api.http import build
from encoder_service.client import AsyncClient, Client, ServiceError
from encoder_service.client import direct as module
from encoder_service.config import LimitOptions
from encoder_service.wire.documents import RequestItem
from encoder_service.wire.formats import Document
from router.replicas.serve_fleet import unknown
from tests.images import jpeg
from tests.unit.front_door import Fleet, service
from tests.unit.proxied import in_a_thread
from tests.unit.rows.kept import Dictionary, serving

IMAGES = [jpeg(96, 64), jpeg(64, 96), jpeg(128, 128)]


class Keeping(Fleet):
    """One replica, whose embeddings hold random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.store = Dictionary(BlockMemory.shared(2**20))
        self.kept: dict[str, Kept] = {}
        self.at = RowsPlace("", "")
        self.name = "replica"
        self.by_value = self.places = self.fetched = self.released = 0
        self.sizes: list[int] = []

    async def encode(
        self, media: list[Media], dtype: Dtype, timeout_seconds: float, *, reference: bool
    ) -> list[Answer]:
        answers = await super().encode(media, dtype, timeout_seconds, reference=reference)
        self.by_value += not reference
        self.sizes.append(len(media))
        return [
            self.keep(one, answer) if reference and isinstance(answer, Embedding) else answer
            for one, answer in zip(media, answers, strict=True)
        ]

    def keep(self, media: Media, answer: Embedding) -> Embedding:
        rows = torch.randn(answer.shape, dtype=torch.bfloat16)
        name = f"{token_urlsafe(24)}.{token_urlsafe(24)}"
        self.store.tensors[name] = rows
        data = rows.view(torch.uint8).flatten().numpy()
        reference = f"{self.name}.{name}"
        self.kept[reference] = Kept(media, replace(answer, data=data))
        return replace(answer, data=NO_BYTES, reference=reference)

    async def fetch(self, reference: str) -> Kept:
        self.fetched += 1
        if reference not in self.kept:
            raise unknown(reference)
        return self.kept[reference]

    async def release(self, reference: str) -> None:
        self.released += 1

    async def place(self, reference: str) -> RowsPlace:
        self.places += 1
        return self.at


class Served:
    def __init__(self, folder: Path) -> None:
        self.fleet = Keeping()
        self.service = service(self.fleet)
        self.stack = ExitStack()
        self.server, self.fleet.at = self.stack.enter_context(serving(self.fleet.store, folder))
        self.url = self.stack.enter_context(in_a_thread(build(self.service)))

    def rows(self) -> list[np.ndarray[Any, Any]]:
        return [np.asarray(one.embedding.data) for one in self.fleet.kept.values()]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    found = Served(tmp_path)
    with found.stack:
        yield found


def encoded(client: Client) -> list[np.ndarray[Any, Any]]:
    found = client.encode(IMAGES)
    assert [one.reference for one in found] == ["", "", ""]
    return [np.frombuffer(one.data, np.uint8) for one in found]


def test_rows_come_from_the_replica_and_are_released_there(served: Served) -> None:
    with Client(served.url, direct=True) as client:
        for _ in range(3):
            for one, kept in zip(encoded(client), served.rows(), strict=True):
                np.testing.assert_array_equal(one, kept)
            served.fleet.kept.clear()
    served.server.stop()  # once it has released the last one
    assert not served.fleet.store.tensors
    assert served.fleet.store.held == 0
    assert (served.fleet.places, served.fleet.fetched, served.fleet.by_value) == (1, 0, 0)


def test_ids_and_scales_come_from_the_front_door(served: Served) -> None:
    with Client(served.url, direct=True) as client:
        (kept,) = client.encode(IMAGES[:1], reference=True)
        assert kept.reference
        client.encode(IMAGES[:1], dtype="float8_e4m3")
    assert (served.fleet.places, served.fleet.by_value) == (0, 1)


@pytest.mark.parametrize("at", [RowsPlace("/nowhere", ""), RowsPlace("/nowhere", "127.0.0.1:1")])
def test_a_replica_that_cannot_be_reached(served: Served, at: RowsPlace) -> None:
    """Rows come through the front door by id, and after that as without `direct`, for a minute."""
    served.fleet.at = at
    with Client(served.url, direct=True) as client:
        for one, kept in zip(encoded(client), served.rows(), strict=True):
            np.testing.assert_array_equal(one, kept)
        assert (served.fleet.fetched, served.fleet.by_value) == (3, 0)
        assert served.fleet.released == 3
        encoded(client)
    assert (served.fleet.fetched, served.fleet.by_value) == (3, 1)


def test_requests_do_not_all_find_out_that_a_replica_cannot_be_reached(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[RowsPlace] = []

    def connect(place: RowsPlace) -> None:
        tried.append(place)
        sleep(0.1)

    monkeypatch.setattr(RowsReader, "connect", connect)

    async def run() -> None:
        async with AsyncClient(served.url, direct=True) as client:
            await asyncio.gather(*(client.encode(IMAGES[:1]) for _ in range(12)))

    asyncio.run(run())
    assert len(tried) <= module.CONNECTIONS
    assert served.fleet.fetched == 12


def test_a_replica_that_hangs_is_asked_once(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "CALL_SECONDS", 0.2)
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(str(tmp_path / "hangs"))
        listener.listen()
        listener.setblocking(False)
        served.fleet.at = RowsPlace(str(tmp_path / "hangs"), "")
        with Client(served.url, direct=True) as client:
            encoded(client)
        listener.accept()[0].close()
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert served.fleet.fetched == 3


def test_a_replica_that_dies(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was lost with it is encoded again. Another server in its place is found."""
    monkeypatch.setattr(module, "AVOIDED_SECONDS", 0.0)
    with Client(served.url, direct=True) as client:
        encoded(client)
        served.server.stop()
        served.fleet.kept.clear()
        for one, kept in zip(encoded(client), served.rows(), strict=True):
            np.testing.assert_array_equal(one, kept)
        assert served.fleet.fetched == 3
        (tmp_path / "again").mkdir()
        _, served.fleet.at = served.stack.enter_context(
            serving(served.fleet.store, tmp_path / "again")
        )
        served.fleet.kept.clear()
        encoded(client)
    assert served.fleet.fetched == 3


def test_items_that_are_lost_before_they_are_taken_are_encoded_again(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By value, and they alone."""

    def evict(media: Media, answer: Embedding) -> Embedding:
        found = Keeping.keep(served.fleet, media, answer)
        if len(served.fleet.kept) > 1:
            del served.fleet.kept[found.reference]
            del served.fleet.store.tensors[found.reference.partition(".")[2]]
        return found

    monkeypatch.setattr(served.fleet, "keep", evict)
    with Client(served.url, retries=0, direct=True) as client:
        found = client.encode(IMAGES)
        assert [one.index for one in found] == [0, 1, 2]
        assert [one.reference for one in found] == ["", "", ""]
        assert [one.digest for one in found] == [sha256(file).hexdigest() for file in IMAGES]
        assert bytes(found[0].data) == served.rows()[0].tobytes()
        assert [set(one.data) for one in found[1:]] == [{0}, {0}], "those of Fleet"
        assert served.fleet.sizes == [3, 2]
        assert client.client.direct
        assert not client.client.direct.avoided

        there = client.client.transport.encode

        async def encode(items: list[RequestItem], options: dict[str, Any]) -> Document:
            if options.get("reference"):
                return await there(items, options)
            raise ServiceError("invalid_media", "not an image", item=1)

        monkeypatch.setattr(client.client.transport, "encode", encode)
        served.fleet.kept.clear()
        with pytest.raises(ServiceError) as raised:
            client.encode(IMAGES)
        assert raised.value.item == 2


def test_an_idle_connection_that_was_just_ended_is_replaced(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(served.url, direct=True) as client:
        encoded(client)
        for connection in list(served.server._connections):
            connection.end()
        monkeypatch.setattr(RowsReader, "alive", True)  # the end has not arrived yet
        encoded(client)
        assert client.client.direct
        assert not client.client.direct.avoided
    assert served.fleet.fetched == 0


def test_what_arrived_before_the_connection_was_lost_is_kept(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, answers, asked = RowsReader._answer, iter(range(9)), list[str]()
    take, fetch = RowsReader.take, served.fleet.fetch

    def broken(self: RowsReader, target: memoryview | None) -> Any:
        if next(answers) == 1:
            raise ConnectionResetError
        return answer(self, target)

    def taken(self: RowsReader, wanted: Sequence[tuple[str, memoryview]]) -> Any:
        asked.extend(name for name, _ in wanted)
        return take(self, wanted)

    async def fetched(reference: str) -> Kept:
        asked.append(reference)
        return await fetch(reference)

    monkeypatch.setattr(RowsReader, "_answer", broken)
    monkeypatch.setattr(RowsReader, "take", taken)
    monkeypatch.setattr(served.fleet, "fetch", fetched)
    with Client(served.url, direct=True) as client:
        for one, kept in zip(encoded(client), served.rows(), strict=True):
            np.testing.assert_array_equal(one, kept)
    first, *others = (reference.partition(".")[2] for reference in served.fleet.kept)
    assert asked[:5] == [first, *others, *others]
    assert not [one for one in asked[5:] if one.endswith(first)]


def test_what_is_too_large_to_be_kept_is_sent(served: Served) -> None:
    served.service.references = ReferenceOptions(max_bytes=0)
    with Client(served.url, direct=True) as client:
        assert [len(one.data) > 0 for one in client.encode(IMAGES)] == [True] * 3
        assert served.fleet.by_value == 1
        served.service.limits = LimitOptions(max_response_bytes=1)
        with pytest.raises(ServiceError, match="max_response_bytes"):
            client.encode(IMAGES)


def test_connections_of_replicas_that_are_gone_are_closed(served: Served, tmp_path: Path) -> None:
    with Client(served.url, direct=True) as client:
        encoded(client)
        served.server.stop()
        (tmp_path / "again").mkdir()
        served.fleet.name = "other"
        _, served.fleet.at = served.stack.enter_context(
            serving(served.fleet.store, tmp_path / "again")
        )
        encoded(client)
        assert client.client.direct
        assert client.client.direct._replicas.keys() == {"other"}


def test_a_service_that_says_more_than_is_known(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(served.url, direct=True) as client:
        there = client.client.transport.place

        async def place(reference: str) -> Document:
            return await there(reference) | {"rdma": "mlx5_0"}

        monkeypatch.setattr(client.client.transport, "place", place)
        encoded(client)
    assert served.fleet.fetched == 0


@pytest.mark.parametrize(
    "given", [{"shape": [2**40, 2**20]}, {"shape": [-1, 2]}, {"shape": None}, {"dtype": "int3"}]
)
def test_what_is_no_document_is_an_error_of_the_service(
    served: Served, monkeypatch: pytest.MonkeyPatch, given: Document
) -> None:
    with Client(served.url, direct=True) as client:
        there = client.client.transport.encode

        async def encode(items: list[RequestItem], options: dict[str, Any]) -> Document:
            found = await there(items, options)
            return found | {"items": [one | given for one in found["items"]]}

        monkeypatch.setattr(client.client.transport, "encode", encode)
        with pytest.raises(ServiceError, match="not a response of this service"):
            client.encode(IMAGES)


def test_nothing_goes_on_after_an_error(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    served.fleet.at = RowsPlace("/nowhere", "")
    left: list[str] = []
    with Client(served.url, retries=0, direct=True) as client:

        async def fetch(reference: str) -> Document:
            left.append(reference)
            if len(left) == len(IMAGES):
                raise ServiceError("unavailable", "no replica")
            try:
                never: asyncio.Future[Document] = asyncio.get_running_loop().create_future()
                return await never
            finally:
                left.remove(reference)

        monkeypatch.setattr(client.client.transport, "fetch", fetch)
        with pytest.raises(ServiceError, match="no replica"):
            client.encode(IMAGES)
        assert len(left) == 1
