"""The client's HTTP against a server that answers as it is told, byte by byte."""

from __future__ import annotations

import asyncio
import gzip
import os
import ssl
import subprocess
import sys
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from platform import libc_ver
from shutil import which

import aiohttp
import pytest
import uvloop
from yarl import URL

from encoder_service.client import ServiceError
from encoder_service.client.receiving import Space, Takeover
from encoder_service.client.transports import (
    CleanConnector,
    HttpTransport,
    connect,
    environment_proxy,
)
from encoder_service.wire.formats import write_safetensors

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
async def listening(answer: Answer) -> AsyncIterator[tuple[str, Server]]:
    """The server's address, host and port."""
    server = Server(answer)
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as sockets:
        yield f"127.0.0.1:{sockets.sockets[0].getsockname()[1]}", server


@asynccontextmanager
async def client(
    answer: Answer, timeout_seconds: float = 5
) -> AsyncIterator[tuple[HttpTransport, Server]]:
    async with listening(answer) as (address, server):
        http = HttpTransport(f"http://{address}", None, timeout_seconds)
        try:
            yield http, server
        finally:
            await http.close()


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
        *("whole", "torn", "nothing", "204", "long head", "gzip", "chunked", "more"),
        *("last", "old", "endless", "closed"),
    ],
)
async def test_bodies_come_whole_and_connections_are_used_again(
    answer: Answer, body: bytes, connections: int
) -> None:
    async with client(answer) as (http, server):
        for _ in range(3):
            found = await http.request("POST", "/there?x=1", b"sent")
            assert found == body
            for _ in range(5):  # rounds of the loop: a server that closes has done so
                await asyncio.sleep(0.002)
        assert server.connections == connections
        assert server.seen[0].startswith(b"POST /there?x=1 HTTP/1.1\r\n")
        assert all(request.endswith(b"\r\n\r\nsent") for request in server.seen)


ITEMS = [
    {"index": 0, "dtype": "float32", "shape": [3, 1000], "data": BODY[:12_000]},
    {"index": 1, "error": {"type": "invalid_media"}},
    {"index": 2, "dtype": "bfloat16", "shape": [0, 8], "data": b""},
    {"index": 3, "dtype": "float16", "shape": [750_000, 2], "data": BODY[:3_000_000]},
]
EMBEDDINGS = b"".join(write_safetensors({"model": "m", "items": ITEMS}, ""))


def encoded(body: bytes) -> bytes:
    return sized(body, b"content-type: application/vnd.safetensors")


@pytest.mark.parametrize("torn", [10**9, 100_000, 7_777])
def test_each_embedding_comes_whole_in_a_buffer_of_its_own(
    torn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    response, received, receive = encoded(EMBEDDINGS), list[int](), Takeover.receive

    async def noted(self: Takeover, space: Space) -> None:
        received.append(space.bytes_left)
        await receive(self, space)

    monkeypatch.setattr(Takeover, "receive", noted)
    parts = [response[at : at + torn] for at in range(0, len(response), torn)]

    async def run() -> None:
        async with client(says(*parts)) as (http, server):
            for _ in range(2):
                document = await http.encode([], {})
                assert document == {"model": "m", "items": ITEMS}
                rows = [item["data"] for item in document["items"] if "data" in item]
                assert all(isinstance(one, bytearray) for one in rows)
            assert server.connections == 1
        assert len(received) == 2
        assert min(received) > 2_000_000, "what came after the first packets"

    asyncio.run(run())


@pytest.mark.skipif(not which("openssl"), reason="needs openssl")
def test_embeddings_come_over_tls(tmp_path: Path) -> None:
    key, certificate = str(tmp_path / "key"), str(tmp_path / "certificate")
    make = (
        "openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=x -addext subjectAltName=IP:127.0.0.1"
    )
    subprocess.run([*make.split(), "-keyout", key, "-out", certificate], check=True)
    there = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    there.load_cert_chain(certificate, key)

    async def run() -> None:
        server = Server(says(encoded(EMBEDDINGS)))
        async with await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=there) as sockets:
            url = f"https://127.0.0.1:{sockets.sockets[0].getsockname()[1]}"
            http = HttpTransport(url, None, 5)
            here = ssl.create_default_context(cafile=certificate)
            http.session = aiohttp.ClientSession(connector=CleanConnector(ssl=here))
            for _ in range(3):
                assert await http.encode([], {}) == {"model": "m", "items": ITEMS}
            assert server.connections == 1
            await http.close()

    asyncio.run(run())


@pytest.mark.parametrize("begun", [1000, 500_000, 2_900_000])
def test_embeddings_that_stop_coming(begun: int) -> None:
    part = encoded(EMBEDDINGS)[:begun]

    async def run() -> None:
        async with client(says(part), timeout_seconds=0.3) as (http, _):
            with pytest.raises(ServiceError) as failed:
                await http.encode([], {})
            assert failed.value.type == "deadline_exceeded"
        async with client(says(part, close=True)) as (http, _):
            with pytest.raises(ServiceError) as failed:
                await http.encode([], {})
            assert (failed.value.type, failed.value.retryable) == ("unavailable", True)
        answers = [says(part), says(encoded(EMBEDDINGS))]
        async with client(lambda writer: answers.pop(0)(writer)) as (http, server):
            request = asyncio.create_task(http.encode([], {}))
            await asyncio.sleep(0.1)
            request.cancel()
            await asyncio.wait_for(server.left.wait(), 5)
            assert await http.encode([], {}) == {"model": "m", "items": ITEMS}
            assert server.connections == 2

    asyncio.run(run())


def test_a_connection_is_used_again_though_the_end_of_a_response_comes_late() -> None:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n"
    head += b"content-type: application/vnd.safetensors\r\n\r\n%x\r\n" % len(EMBEDDINGS)

    async def run() -> None:
        async with client(says(head + EMBEDDINGS, b"\r\n", b"0\r\n\r\n")) as (http, server):
            for _ in range(3):
                assert await http.encode([], {}) == {"model": "m", "items": ITEMS}
            assert server.connections == 1

    asyncio.run(run())


HEADER_BYTES = int.from_bytes(EMBEDDINGS[:8], "little")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{}", "ends within its header"),
        (EMBEDDINGS[:50], "ends within its header"),
        (EMBEDDINGS[:-1], "ends within an embedding"),
        (b"\xff" * 60, "over 67108864"),
        (EMBEDDINGS[:8] + b" " * HEADER_BYTES, "not JSON"),
        (EMBEDDINGS[:8] + b"{}".ljust(HEADER_BYTES), "not a response"),
        (EMBEDDINGS.replace(b"[0, 12000]", b"[9, 12000]"), "not a response"),
        (EMBEDDINGS.replace(b"[0, 12000]", b"[0, -1000]"), "not a response"),
        (EMBEDDINGS.replace(b"[0, 12000]", b"[0, 9e999]"), "not a response"),
        (EMBEDDINGS.replace(b"[0, 12000]", b"[0,   4e9]"), "cannot be"),
        (EMBEDDINGS + b"x", "goes on"),
    ],
    ids=[
        *("empty", "header", "rows", "length", "no JSON", "no document"),
        *("gap", "minus", "endless", "huge", "more"),
    ],
)
async def test_a_response_without_its_embeddings_is_invalid(body: bytes, message: str) -> None:
    async with client(says(encoded(body))) as (http, _):
        with pytest.raises(ServiceError, match=message) as failed:
            await http.encode([], {})
        assert failed.value.type == "invalid_response"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (says(close=True), "unavailable"),
        (says(KNOWN[:90_000], close=True), "unavailable"),
        (says(CHUNKED, close=True), "unavailable"),
        (says(b"SSH-2.0-OpenSSH\r\n\r\n"), "unavailable"),
        (says(sized(b"{}", b"content-encoding: gzip")), "unavailable"),
        (says(sized(b"{}") + b"c"), "unavailable"),
        (says(), "deadline_exceeded"),
        (says(KNOWN[:90_000]), "deadline_exceeded"),
    ],
    ids=["at once", "torn", "torn chunks", "no HTTP", "no gzip", "too much", "silent", "stops"],
)
async def test_what_goes_wrong_is_a_service_error(answer: Answer, error: str) -> None:
    async with client(answer, timeout_seconds=0.3) as (http, _):
        with pytest.raises(ServiceError) as failed:
            await http.model()
    assert failed.value.type == error
    assert failed.value.retryable == (error == "unavailable")
    assert failed.value.status is None


@pytest.mark.parametrize("status", [b"304 Not Modified", b"307 Temporary Redirect"])
def test_redirects_are_errors_and_not_followed(status: bytes) -> None:
    answer = says(b"HTTP/1.1 %b\r\nlocation: /x\r\ncontent-length: 0\r\n\r\n" % status)

    async def run() -> None:
        async with client(answer) as (http, server):
            for _ in range(2):
                with pytest.raises(ServiceError, match=status[:3].decode()) as failed:
                    await http.model()
                assert (failed.value.type, failed.value.retryable) == ("http_error", False)
            assert (len(server.seen), server.connections) == (2, 1)

    asyncio.run(run())


@pytest.mark.parametrize("body", [b'{"error": "no host"}', b"null", b"[1]", b"<html>"])
def test_errors_of_a_proxy_are_retryable_whatever_they_say(body: bytes) -> None:
    head = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: %d\r\n\r\n" % len(body)

    async def run() -> None:
        async with client(says(head + body)) as (http, _):
            with pytest.raises(ServiceError, match="503") as failed:
                await http.model()
            assert (failed.value.type, failed.value.retryable) == ("unavailable", True)

    asyncio.run(run())


@pytest.mark.parametrize(("status", "kind"), [(413, "too_large"), (504, "deadline_exceeded")])
def test_limits_of_a_proxy_are_named_as_ours(status: int, kind: str) -> None:
    head = b"HTTP/1.1 %d Refused\r\ncontent-length: 6\r\n\r\n<html>" % status

    async def run() -> None:
        async with client(says(head)) as (http, _):
            with pytest.raises(ServiceError, match=f"{status} <html>") as failed:
                await http.model()
            assert (failed.value.type, failed.value.retryable) == (kind, False)

    asyncio.run(run())


async def test_a_model_card_that_is_not_json_is_an_invalid_response() -> None:
    async with client(says(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nno")) as (http, _):
        with pytest.raises(ServiceError, match="not JSON") as failed:
            await http.model()
        assert failed.value.type == "invalid_response"


def test_a_size_that_nobody_sends_takes_no_memory() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 999999999999999\r\n\r\n"

    async def run() -> None:
        async with client(says(head, close=True)) as (http, _):
            with pytest.raises(ServiceError) as failed:
                await http.model()
            assert failed.value.type == "unavailable"

    asyncio.run(run())


async def test_a_request_of_many_pieces_comes_whole() -> None:
    async with client(says(sized(b""))) as (http, server):
        for _ in range(2):
            await http.request("POST", "/", BODY * 5)
        assert all(request.endswith(b"\r\n\r\n" + BODY * 5) for request in server.seen)
        assert (len(server.seen), server.connections) == (2, 1)


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
        async with await asyncio.start_server(refuse, "127.0.0.1", 0) as sockets:
            http = HttpTransport(f"http://127.0.0.1:{sockets.sockets[0].getsockname()[1]}", None, 5)
            for _ in range(2):
                with pytest.raises(ServiceError) as refused:
                    await http.request("POST", "/", BODY * 10)
                assert refused.value.status == 413
            await http.close()
            over.set()
        assert connections == 2

    asyncio.run(run())


async def test_requests_at_a_time_have_a_connection_each() -> None:
    async with client(says(KNOWN)) as (http, server):
        answers = await asyncio.gather(*(http.request("GET", "/") for _ in range(5)))
        assert all(found == BODY for found in answers)
        assert server.connections == 5
        await asyncio.gather(*(http.request("GET", "/") for _ in range(5)))
        assert server.connections == 5


def test_connections_that_nobody_uses_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encoder_service.client.transports.IDLE_SECONDS", 0.4)

    async def run() -> None:
        async with client(says(sized(b""))) as (http, server):
            await asyncio.gather(*(http.request("GET", "/") for _ in range(5)))
            for _ in range(2):  # one is enough for these
                await asyncio.sleep(0.25)
                await http.request("GET", "/")
            await asyncio.wait_for(server.left.wait(), 5)

    asyncio.run(run())


@pytest.mark.parametrize("host", ["127.0.0.1:1", f"{'a' * 64}.invalid"])
async def test_who_cannot_be_reached_is_unavailable(host: str) -> None:
    http = HttpTransport(f"http://{host}", None, 5)
    with pytest.raises(ServiceError, match=host) as failed:
        await http.model()
    assert (failed.value.type, failed.value.retryable) == ("unavailable", True)
    await http.close()


async def test_a_port_that_speaks_no_http_is_named_and_no_header_shown() -> None:
    async with listening(says(b"SSH-2.0-OpenSSH\r\n\r\n")) as (address, _):
        http = HttpTransport(f"http://{address}", "a-secret", 5)
        with pytest.raises(ServiceError, match="is it the gRPC port") as failed:
            await http.model()
        assert "a-secret" not in str(failed.value)
        await http.close()
    http = HttpTransport(f"http://{address}", "a-secret", 5)
    with pytest.raises(ServiceError, match="is the service running there") as failed:
        await http.model()
    assert "ConnectionKey" not in str(failed.value)
    assert failed.value.__suppress_context__, "a traceback shows this error alone"
    await http.close()
    encoder = connect(f"grpc://{address}", None, 5)
    with pytest.raises(ServiceError, match="is the service running there") as failed:
        await encoder.model()
    assert failed.value.__suppress_context__
    assert failed.value.retryable
    await encoder.close()


async def test_a_port_that_speaks_http_is_named_to_grpc() -> None:
    async with listening(says(b"HTTP/1.1 400 Bad Request\r\n\r\n")) as (address, _):
        encoder = connect(f"grpc://{address}", None, 5)
        with pytest.raises(ServiceError, match="is it the HTTP port") as failed:
            await encoder.model()
        assert (failed.value.type, failed.value.retryable) == ("unavailable", True)
        await encoder.close()


@pytest.mark.parametrize("scheme", ["http", "grpc"])
@pytest.mark.parametrize("token", ["of two\nlines", "ends\n", "schl\u00fcssel"])
def test_a_token_that_no_header_can_carry(scheme: str, token: str) -> None:
    with pytest.raises(ValueError, match="the token has a line break"):
        connect(f"{scheme}://127.0.0.1:1", token, 5)


FAULTS = """
import resource, sys
from encoder_service.client.transports import connect
if len(sys.argv) > 1:
    connect(sys.argv[1], None, 5)
def receive():
    for _ in range(4):
        rows = [b"x" * 2**22 for _ in range(32)]
        del rows
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
before = receive()
print(receive() - before)
"""


@pytest.mark.skipif(libc_ver()[0] != "glibc", reason="about glibc's allocator")
def test_memory_of_a_large_response_is_used_again_for_the_next() -> None:
    unset = {name: value for name, value in os.environ.items() if "MALLOC" not in name}

    def faults(*url: str, **settings: str) -> int:
        command, env = [sys.executable, "-c", FAULTS, *url], unset | settings
        return int(subprocess.run(command, env=env, check=True, capture_output=True).stdout)

    url = "grpc://127.0.0.1:1"
    assert faults(url) < 1000 < faults()
    assert faults(url, MALLOC_TRIM_THRESHOLD_="131072") > 1000


@pytest.mark.parametrize(
    "url",
    ["http://", "http:///v1", "http://host:99999", "grpc://", "grpc://:9000", "grpc://host:99999"],
)
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(ValueError, match=r"host|[Pp]ort"):
        connect(url, None, 5)


async def test_who_waits_no_longer_hangs_up() -> None:
    async with client(says(KNOWN[:90_000])) as (http, server):
        request = asyncio.create_task(http.model())
        while not server.seen:
            await asyncio.sleep(0.01)
        request.cancel()
        await asyncio.wait_for(server.left.wait(), 5)


@pytest.fixture
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return monkeypatch


async def asked(url: str, token: str | None = None) -> None:
    http = HttpTransport(url, token, 5)
    await http.request("GET", "/v1/model")
    await http.close()


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy"])
async def test_a_proxy_of_the_environment(name: str, no_proxies: pytest.MonkeyPatch) -> None:
    async with listening(says(sized(b""))) as (address, server):
        no_proxies.setenv(name, f"http://user:word@{address}")
        await asked("http://encoder:8000")
        head = server.seen[0].lower()
        assert head.startswith(b"get http://encoder:8000/v1/model http/1.1\r\n")
        assert b"proxy-authorization: basic " + b64encode(b"user:word").lower() in head


@pytest.mark.parametrize("proxy", ["{address}", "http://{address}"])
async def test_a_proxy_needs_no_scheme_and_no_name(
    proxy: str, no_proxies: pytest.MonkeyPatch
) -> None:
    async with listening(says(sized(b""))) as (address, server):
        no_proxies.setenv("http_proxy", proxy.format(address=address))
        await asked("http://encoder:8000")
        assert b"proxy-authorization" not in server.seen[0].lower()
        assert server.connections == 1


def test_this_machine_and_hosts_in_no_proxy_are_reached_directly(
    no_proxies: pytest.MonkeyPatch,
) -> None:
    no_proxies.setenv("http_proxy", "http://127.0.0.1:1")
    no_proxies.setenv("no_proxy", "encoder")
    urls = ("http://encoder:8000", "http://localhost:8000", "http://[::1]:8000", "http://other")
    assert [environment_proxy(URL(url)) is None for url in urls] == [True, True, True, False]

    async def run() -> None:
        async with listening(says(sized(b""))) as (address, server):
            await asked(f"http://{address}")
            assert server.seen[0].startswith(b"GET /v1/model ")

    asyncio.run(run())


def test_a_proxy_that_cannot_be_used(no_proxies: pytest.MonkeyPatch) -> None:
    no_proxies.setenv("all_proxy", "socks5://127.0.0.1:1")
    with pytest.raises(ValueError, match=r"socks5 proxy.*encoder to no_proxy"):
        connect("http://encoder:8000", None, 5)


async def test_a_name_and_a_password_are_sent_and_not_told(no_proxies: pytest.MonkeyPatch) -> None:
    async with listening(says(sized(b""), close=True)) as (address, server):
        await asked(f"http://user:w%C3%B6rd@{address}", "token")
        basic = b64encode("user:w\u00f6rd".encode())
        assert b"authorization: basic " + basic.lower() in server.seen[0].lower()
    http = HttpTransport(f"http://user:word@{address}", None, 5)
    with pytest.raises(ServiceError) as failed:
        await http.model()
    await http.close()
    assert "word" not in str(failed.value)


async def test_a_path_before_ours(no_proxies: pytest.MonkeyPatch) -> None:
    async with listening(says(sized(b""))) as (address, server):
        await asked(f"http://{address}/a%20b/")
        assert server.seen[0].startswith(b"GET /a%20b/v1/model ")
