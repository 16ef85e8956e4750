"""How long the client waits: for all attempts together, and for an answer that never ends."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from encoder_service.client import AsyncClient, ServiceError


def test_the_deadline_is_that_of_all_attempts_together() -> None:
    attempts = 0

    async def call() -> None:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise ServiceError("overloaded", "later", retryable=True)
        await asyncio.Event().wait()

    async def ask() -> None:
        async with AsyncClient("http://test", timeout_seconds=2) as client:
            await client.persist(call)

    with pytest.raises(ServiceError, match="within 2 s and 2 attempts") as refused:
        asyncio.run(ask())
    assert refused.value.type == "deadline_exceeded"


async def trickle(writer: asyncio.StreamWriter) -> None:
    """An answer that never ends, though none of its bytes is late."""
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
    with suppress(ConnectionError):
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.05)
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


def test_an_answer_that_trickles_is_given_up() -> None:
    async def ask() -> None:
        answers: list[asyncio.Task[None]] = []
        server = await asyncio.start_server(
            lambda _, writer: answers.append(asyncio.create_task(trickle(writer))), "127.0.0.1", 0
        )
        host, port = server.sockets[0].getsockname()
        async with server, AsyncClient(f"http://{host}:{port}", timeout_seconds=0.3) as client:
            assert not await client.ready()
            with pytest.raises(ServiceError, match=r"within 0\.3 s and one attempt") as refused:
                await client.encode([b"x"])
            assert refused.value.type == "deadline_exceeded"
            await asyncio.gather(*answers)

    asyncio.run(asyncio.wait_for(ask(), 20))
