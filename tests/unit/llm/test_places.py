"""How vLLM's connector learns where rows are: its own client against a PlaceServer."""

from __future__ import annotations

import asyncio

import pytest

from actors.errors import NotFound, Unavailable
from actors.rows.protocol import RowsPlace
from encoder_service.client import ServiceError
from encoder_service.client.transports import HttpTransport
from encoder_service.llm.places import PlaceServer

PLACE = RowsPlace("/tmp/rows", "10.0.0.1:7000")


async def rows_place(reference: str) -> RowsPlace:
    if reference == "gone.content":
        raise NotFound("no such replica")
    if reference == "early.content":
        raise Unavailable("no encoder replica is known here yet")
    return PLACE


def asked(reference: str, token: str | None = None) -> RowsPlace:
    """`token`: the server's own if None."""

    async def run() -> RowsPlace:
        server = PlaceServer(rows_place)
        transport = HttpTransport(server.url, server.token if token is None else token, 5)
        try:
            return RowsPlace.read(await transport.place(reference))
        finally:
            await transport.close()
            await server._runner.cleanup()

    return asyncio.run(run())


def test_a_place_is_told() -> None:
    assert asked("replica.content") == PLACE


async def test_a_server_that_cannot_start_is_noticed() -> None:
    server = PlaceServer(rows_place)
    server.check()  # it has not begun
    server._socket.close()
    with pytest.raises(OSError, match="descriptor"):
        await server._starting
    with pytest.raises(OSError, match="descriptor"):
        server.check()
    await server._runner.cleanup()


@pytest.mark.parametrize(
    ("reference", "token", "status"),
    [
        ("gone.content", None, 404),
        ("early.content", None, 503),
        ("replica.content", "guessed", 401),
        ("replica.content", "", 401),
    ],
)
def test_a_place_is_not_told(reference: str, token: str | None, status: int) -> None:
    with pytest.raises(ServiceError) as refused:
        asked(reference, token)
    assert refused.value.status == status
