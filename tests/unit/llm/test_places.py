"""How vLLM's connector learns where rows are: its own client against a PlaceServer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from actors.errors import NotFound
from actors.rows.protocol import RowsPlace
from encoder_service.client import ServiceError
from encoder_service.client.transports import HttpTransport
from encoder_service.llm.places import PlaceServer

PLACE = RowsPlace("/tmp/rows", "10.0.0.1:7000")


async def rows_place(reference: str) -> RowsPlace:
    if reference != "replica.content":
        raise NotFound("no such replica")
    return PLACE


@pytest.fixture
def server() -> Iterator[PlaceServer]:
    found = PlaceServer(rows_place)
    yield found
    found.close()


def asked(server: PlaceServer, token: str, reference: str) -> RowsPlace:
    async def run() -> RowsPlace:
        transport = HttpTransport(server.url, token, 5)
        try:
            return RowsPlace.read(await transport.place(reference))
        finally:
            await transport.close()

    return asyncio.run(run())


def test_a_place_is_told_to_its_own_connector_alone(server: PlaceServer) -> None:
    assert asked(server, server.token, "replica.content") == PLACE
    for token, reference, status in (
        (server.token, "another.content", 404),
        ("guessed", "replica.content", 401),
        ("", "replica.content", 401),
    ):
        with pytest.raises(ServiceError) as refused:
            asked(server, token, reference)
        assert refused.value.status == status
