"""The client's own connections, before a server that answers as it is told, byte by byte."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import httpx
import pytest
import uvloop

from encoder_service.client.connections import Connections, direct
from encoder_service.client.embedding import ServiceError
from encoder_service.client.over_http import HttpTransport

BODY = bytes(range(256)) * 12_000
"""Several megabytes."""

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


class Server:
    """Answers each request; `connections` counts those that were opened."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.connections = 0
        self.seen: list[bytes] = []
        self.left = asyncio.Event()
        """A connection ended."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
                self.seen.append(head + await reader.readexactly(int(length or 0)))
                await self.answer(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.left.set()
        finally:
            writer.close()


@asynccontextmanager
async def client(answer: Answer) -> AsyncIterator[tuple[httpx.AsyncClient, Server]]:
    server = Server(answer)
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        transport = Connections(tls=False)
        async with httpx.AsyncClient(base_url=url, transport=transport, timeout=5) as http:
            yield http, server


def says(*pieces: bytes, close: bool = False) -> Answer:
    """These, one after the other."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.001)
        if close:
            writer.close()

    return answer


def sized(body: bytes, *headers: bytes) -> bytes:
    return b"\r\n".join(
        (b"HTTP/1.1 200 OK", b"content-length: %d" % len(body), *headers, b"", body)
    )


KNOWN = sized(BODY)
LONG_HEAD = sized(b"", b"x: " + b"a" * 40_000)
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"".join(
    b"%x\r\n%b\r\n" % (len(part), part) for part in (BODY[:10], BODY[10:70_000], BODY[70_000:])
)


@pytest.fixture(params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy], autouse=True)
def loop(request: pytest.FixtureRequest) -> Iterator[None]:
    """Either of the loops that a caller may have: Ray's actors and uvicorn run uvloop."""
    asyncio.set_event_loop_policy(request.param())
    yield
    asyncio.set_event_loop_policy(None)


@pytest.mark.parametrize(
    ("answer", "body", "connections"),
    [
        (says(KNOWN), BODY, 1),
        (says(KNOWN[:20], KNOWN[20:60], KNOWN[60:90_000], KNOWN[90_000:]), BODY, 1),
        (says(b"HTTP/1.1 100 Continue\r\n\r\n" + sized(b"")), b"", 1),
        (says(b"HTTP/1.1 204 No Content\r\n\r\n"), b"", 1),
        (says(b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n"), b"", 1),
        (says(LONG_HEAD[:20_000], LONG_HEAD[20_000:]), b"", 1),
        (says(sized(gzip.compress(BODY), b"content-encoding: gzip")), BODY, 1),
        (says(CHUNKED, b"0\r\n\r\n"), BODY, 1),
        (says(CHUNKED + b"0\r\n\r\n" + sized(b"not asked for")), BODY, 3),
        (says(sized(b"last", b"Connection: Close")), b"last", 3),
        (says(b"HTTP/1.0 200 OK\r\ncontent-length: 3\r\n\r\nold"), b"old", 3),
        (says(b"HTTP/1.1 200 OK\r\n\r\n", b"until ", b"the end", close=True), b"until the end", 3),
        (says(sized(b"gone"), close=True), b"gone", 3),
    ],
    ids=[
        *("whole", "torn", "nothing", "204", "304", "long head", "gzip", "chunked", "more"),
        *("last", "old", "endless", "closed"),
    ],
)
def test_bodies_come_whole_and_connections_are_used_again(
    answer: Answer, body: bytes, connections: int
) -> None:
    async def run() -> None:
        async with client(answer) as (http, server):
            for _ in range(3):
                found = await http.post("/there?x=1", content=b"sent")
                assert found.content == body
                await asyncio.sleep(0.01)  # a server that closes has done so
            assert server.connections == connections
            assert server.seen[0].startswith(b"POST /there?x=1 HTTP/1.1\r\n")
            assert all(request.endswith(b"\r\n\r\nsent") for request in server.seen)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (says(close=True), httpx.TransportError),
        (says(KNOWN[:90_000], close=True), httpx.ReadError),
        (says(CHUNKED, close=True), httpx.RemoteProtocolError),
        (says(b"SSH-2.0-OpenSSH\r\n\r\n"), httpx.RemoteProtocolError),
        (says(sized(b"ab") + b"c"), httpx.RemoteProtocolError),
        (says(), httpx.ReadTimeout),
        (says(KNOWN[:90_000]), httpx.ReadTimeout),
    ],
    ids=["at once", "torn", "torn chunks", "no HTTP", "too much", "silent", "stops"],
)
def test_what_goes_wrong_is_an_error_of_httpx(answer: Answer, error: type[Exception]) -> None:
    async def run() -> None:
        async with client(answer) as (http, _):
            with pytest.raises(error):
                await http.get("/", timeout=0.3)

    asyncio.run(run())


def test_a_body_that_is_not_the_gzip_it_says_is_a_service_error() -> None:
    async def run() -> None:
        async with client(says(sized(b"{}", b"content-encoding: gzip"))) as (http, _):
            transport = HttpTransport(str(http.base_url), None, 5)
            with pytest.raises(ServiceError, match="DecodingError") as failed:
                await transport.model()
            await transport.close()
        assert failed.value.retryable

    asyncio.run(run())


def test_a_request_of_many_pieces_comes_whole() -> None:
    async def run() -> None:
        async with client(says(sized(b""))) as (http, server):
            for _ in range(2):
                await http.post("/", content=BODY * 5)
            assert all(request.endswith(b"\r\n\r\n" + BODY * 5) for request in server.seen)
            assert (len(server.seen), server.connections) == (2, 1)

    asyncio.run(run())


def test_an_answer_before_all_was_sent_ends_the_connection() -> None:
    over = asyncio.Event()
    connections = 0

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n")
        await over.wait()
        writer.close()

    async def run() -> None:
        async with await asyncio.start_server(refuse, "127.0.0.1", 0) as listening:
            url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
            async with httpx.AsyncClient(transport=Connections(tls=False), timeout=5) as http:
                for _ in range(2):
                    assert (await http.post(url, content=BODY * 10)).status_code == 413
            over.set()
        assert connections == 2

    asyncio.run(run())


def test_requests_at_a_time_have_a_connection_each() -> None:
    async def run() -> None:
        async with client(says(KNOWN)) as (http, server):
            answers = await asyncio.gather(*(http.get("/") for _ in range(5)))
            assert all(one.content == BODY for one in answers)
            assert server.connections == 5
            await asyncio.gather(*(http.get("/") for _ in range(5)))
            assert server.connections == 5

    asyncio.run(run())


def test_connections_that_nobody_uses_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encoder_service.client.connections.IDLE_SECONDS", 0.4)

    async def run() -> None:
        async with client(says(sized(b""))) as (http, server):
            await asyncio.gather(*(http.get("/") for _ in range(5)))
            for _ in range(2):  # one is enough for these
                await asyncio.sleep(0.25)
                await http.get("/")
            await asyncio.wait_for(server.left.wait(), 5)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("url", "header", "error"),
    [
        ("http://127.0.0.1:1", "told", httpx.ConnectError),
        (f"http://{'a' * 64}.invalid", "told", httpx.ConnectError),
        ("", "of two\nlines", httpx.LocalProtocolError),
    ],
    ids=["refused", "no name", "header"],
)
def test_what_cannot_be_sent_is_an_error_of_httpx(
    url: str, header: str, error: type[Exception]
) -> None:
    async def run() -> None:
        async with client(says(sized(b""))) as (http, _):
            with pytest.raises(error):
                await http.get(url, headers={"authorization": header})

    asyncio.run(run())


def test_who_waits_no_longer_hangs_up() -> None:
    async def run() -> None:
        async with client(says(KNOWN[:90_000])) as (http, server):
            request = asyncio.create_task(http.get("/"))
            while not server.seen:
                await asyncio.sleep(0.01)
            request.cancel()
            await asyncio.wait_for(server.left.wait(), 5)

    asyncio.run(run())


def test_a_proxy_of_the_environment_is_httpx_own_business(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    assert direct("http://encoder:8000")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert direct("http://encoder:8000") is None
    assert direct("https://encoder")
    monkeypatch.setenv("no_proxy", "encoder")
    assert direct("http://encoder:8000")


def test_a_name_and_a_password_are_httpx_own_business(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert direct("http://user:word@127.0.0.1:8000") is None
    assert direct("http://127.0.0.1:8000")
