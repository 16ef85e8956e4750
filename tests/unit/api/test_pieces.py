"""Bodies in pieces: sent from where they lie by the server that Serve runs, pickled as bytes."""

from __future__ import annotations

import asyncio
import pickle
import socket
from contextlib import suppress

import httpx
import pytest
import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send

from encoder_service.api.http import BodyView, InPieces, build, gathered, held_bytes, response
from encoder_service.intake.limits import INLINE_BYTES
from encoder_service.wire.formats import JSON, MSGPACK, Piece
from tests.images import jpeg
from tests.unit.front_door import Fleet, service
from tests.unit.proxied import listening

LARGE = bytes(range(256)) * 20_000
PIECES: list[Piece] = [
    b"a",
    b"b",
    memoryview(LARGE),
    b"c",
    memoryview(b"d"),
    memoryview(LARGE),
    b"",
]


def test_what_is_small_becomes_one_and_the_rest_is_not_copied() -> None:
    first, large, middle, again, last = gathered(PIECES)
    assert (first, middle, last) == (b"ab", b"cd", b"")
    assert isinstance(large, BodyView)
    assert isinstance(again, BodyView)
    assert large is again
    assert large
    assert gathered([]) == [b""]
    assert gathered([memoryview(bytes(INLINE_BYTES))]) == [bytes(INLINE_BYTES)]


def test_a_view_is_pickled_as_bytes() -> None:
    messages = [{"body": one} for one in gathered(PIECES)]
    again = pickle.loads(pickle.dumps(messages))
    assert {type(message["body"]) for message in again} == {bytes}
    assert b"".join(message["body"] for message in again) == b"".join(PIECES)
    assert again[1]["body"] is again[3]["body"]
    assert held_bytes(PIECES) == len(LARGE) + 4


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    answer = await response(PIECES, "application/x-pieces")
    await answer(scope, receive, send)


def test_asyncios_own_loop_gets_bytes() -> None:
    async def ask() -> httpx.Response:
        assert not isinstance(await response(PIECES, "x"), InPieces)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get("/")

    assert asyncio.run(ask()).content == b"".join(PIECES)


@pytest.mark.parametrize("protocol", ["httptools", "h11"])
def test_a_server_on_uvloop_sends_them(protocol: str) -> None:
    async def ask() -> list[httpx.Response]:
        assert isinstance(await response(PIECES, "x"), InPieces)
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            config = uvicorn.Config(app, http=protocol, lifespan="off", log_level="error")
            server = uvicorn.Server(config)
            serving = asyncio.create_task(server.serve([listening]))
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            async with httpx.AsyncClient(base_url=url) as client:
                while not server.started:
                    await asyncio.sleep(0.01)
                found = [await client.get("/") for _ in range(2)]
            server.should_exit = True
            with suppress(asyncio.CancelledError):
                await serving
            return found

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for found in runner.run(ask()):
            assert found.content == b"".join(PIECES)
            assert found.headers["content-type"] == "application/x-pieces"
            assert found.headers["content-length"] == str(len(found.content))


@pytest.mark.parametrize("accept", [MSGPACK, JSON])
def test_answers_count_until_they_are_read(accept: str) -> None:
    """25 MB of rows, or 33 MB of base64, of which one at a time may be unsent."""
    fleet = Fleet()
    one = service(fleet, max_unsent_bytes=40_000_000, max_response_bytes=40_000_000)
    app = build(one)
    files = [("image", jpeg(1024, 1024))] * 64
    headers = {"accept": accept, "accept-encoding": "identity"}

    async def run() -> None:
        async with listening(app) as url, httpx.AsyncClient(base_url=url, timeout=30) as client:
            options = {"options": '{"dtype": "bfloat16"}'}
            large = client.build_request(
                "POST", "/v1/encode", files=files, data=options, headers=headers
            )
            unread = await client.send(large, stream=True)
            refused = await client.send(large)
            assert refused.status_code == 429
            assert "limits.max_unsent_bytes" in refused.text
            assert len(fleet.calls) == 1, "it was encoded all the same"
            small = await client.post("/v1/encode", files=files[:1], headers=headers)
            assert small.status_code == 200, "others are not served"
            await unread.aread()
            left = await client.send(large, stream=True)  # and leaves without reading
            assert left.status_code == 200
            await left.aclose()
            async with asyncio.timeout(10):
                while "encoder_unsent_bytes 0.0" not in one.metrics.text():
                    await asyncio.sleep(0.05)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
