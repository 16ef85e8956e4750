"""URLs lead to hosts that are named, at public addresses, and nowhere else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import httpx
import pytest

from actors.errors import (
    DeadlineExceeded,
    InvalidMedia,
    InvalidRequest,
    Overloaded,
    ServiceError,
    TooLarge,
)
from actors.families.registry import read
from actors.options import ModelOptions
from actors.types import Media
from encoder_service.config import FetchOptions, LimitOptions
from encoder_service.intake.fetch import Fetcher, is_public
from encoder_service.intake.limits import Buffered, Take
from encoder_service.intake.media import Admission
from encoder_service.wire.documents import RequestItem
from tests.unit.front_door import freely

PUBLIC = "93.184.216.34"
Handler = Callable[[httpx.Request], httpx.Response]


def fetch(
    url: str,
    handler: Handler,
    addresses: tuple[str, ...] = (PUBLIC,),
    hosts: tuple[str, ...] = ("Images.Example",),
    timeout_seconds: float = 1,
    take: Take = freely,
) -> bytes:
    """One fetch, with these answers of the name service and the network."""

    async def resolve(host: str) -> tuple[str, ...]:
        if host not in ("images.example", "other.example"):
            raise OSError("unknown host")
        return addresses

    options = FetchOptions(allow_hosts=hosts, max_bytes=1000, timeout_seconds=timeout_seconds)
    return asyncio.run(Fetcher(options, resolve, httpx.MockTransport(handler)).get(url, take))


def forbidden(request: httpx.Request) -> httpx.Response:
    """Nothing may be sent."""
    raise AssertionError(f"connected to {request.url}")


def test_the_connection_goes_to_the_checked_address() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.host == PUBLIC
        assert request.headers["host"] == "images.example"
        assert request.extensions["sni_hostname"] == "images.example"
        assert request.url.raw_path == b"/a.jpg?signature=1"
        return httpx.Response(200, content=b"image")

    assert fetch("https://images.example/a.jpg?signature=1", answer) == b"image"
    assert fetch("https://IMAGES.example:443/a.jpg?signature=1", answer) == b"image"


def test_the_next_address_is_tried() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.host == PUBLIC:
            raise httpx.ConnectError("no route")
        return httpx.Response(200, content=b"image")

    assert fetch("https://images.example/", answer, (PUBLIC, "8.8.8.8")) == b"image"
    with pytest.raises(InvalidMedia, match=r"images.example cannot be reached: no route"):
        fetch("https://images.example/", answer, (PUBLIC,))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://other.example/", "fetch.allow_hosts"),
        ("https://images.example.evil.example/", "fetch.allow_hosts"),
        ("https://images.example./", "fetch.allow_hosts"),
        ("https://127.0.0.1/", "fetch.allow_hosts"),
        ("file:///etc/passwd", "fetch.allow_hosts"),
        ("http://images.example/", "only https"),
        ("https://images.example:8443/", "only https"),
        ("https://user:secret@images.example/", "user name"),
        ("https://images.example:x/", "cannot be read"),
        ("https://images.example/\n", "cannot be read"),
        ("", "fetch.allow_hosts"),
    ],
)
def test_refused_urls(url: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        fetch(url, forbidden)
    assert "secret" not in refused.value.message


def test_nothing_is_fetched_unless_configured() -> None:
    with pytest.raises(InvalidRequest, match="not fetched here"):
        fetch("https://images.example/", forbidden, hosts=())


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.0.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "fe80::1",
        "fe80::1%eth0",
        "fc00::1",
        "ff02::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "64:ff9b::7f00:1",
        "2002:7f00:1::",
        "2001::1",
        "2001:db8::1",
        "localhost",
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)
    with pytest.raises(InvalidRequest, match="not public"):
        fetch("https://images.example/", forbidden, (PUBLIC, address))


def test_addresses_that_are_public() -> None:
    assert is_public(PUBLIC)
    assert is_public("2606:2800:220:1:248:1893:25c8:1946")
    assert is_public("::ffff:93.184.216.34")


def test_redirects_stay_at_the_host() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        places = {"/a": "/b", "/b": "https://images.example/c", "/loop": "/loop"}
        places["/away"] = "https://other.example/"
        places["/down"] = "http://images.example/"
        if request.url.path in places:
            return httpx.Response(302, headers={"location": places[request.url.path]})
        return httpx.Response(200, content=request.url.path.encode())

    hosts = ("images.example", "other.example")
    assert fetch("https://images.example/a", answer) == b"/c"
    with pytest.raises(InvalidMedia, match="redirects more than 3 times"):
        fetch("https://images.example/loop", answer)
    with pytest.raises(InvalidRequest, match=r"redirects to other.example"):
        fetch("https://images.example/away", answer, hosts=hosts)
    with pytest.raises(InvalidRequest, match="allow_hosts"):
        fetch("https://images.example/away", answer)
    with pytest.raises(InvalidRequest, match="only https"):
        fetch("https://images.example/down", answer)


async def endless() -> AsyncIterator[bytes]:
    """A body that does not end."""
    while True:
        yield b"x" * 100
        await asyncio.sleep(0)


async def slow() -> AsyncIterator[bytes]:
    """A body that hangs."""
    yield b"x"
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("response", "error", "message"),
    [
        (httpx.Response(404), InvalidMedia, "answered 404"),
        (httpx.Response(304), InvalidMedia, "answered 304"),
        (httpx.Response(302), InvalidMedia, "answered 302"),
        (httpx.Response(200, headers={"content-length": "9" * 5000}), TooLarge, "over 1000 bytes"),
        (httpx.Response(200, content=b"x" * 1001), TooLarge, "over 1000 bytes"),
        (httpx.Response(200, content=endless()), TooLarge, "over 1000 bytes"),
        (httpx.Response(200, content=slow()), DeadlineExceeded, r"within 0\.1 s"),
        (
            httpx.Response(200, headers={"content-encoding": "br"}, stream=httpx.ByteStream(b"x")),
            InvalidMedia,
            "compressed body",
        ),
    ],
)
def test_answers_that_are_refused(
    response: httpx.Response, error: type[ServiceError], message: str
) -> None:
    with pytest.raises(error, match=message):
        fetch("https://images.example/", lambda _: response, timeout_seconds=0.1)


def test_a_file_is_read_only_while_there_is_room() -> None:
    buffered, answer = Buffered(550, "too much"), httpx.Response(200, content=endless())
    with buffered.hold() as take:
        with pytest.raises(Overloaded, match="too much would exceed 550 bytes"):
            fetch("https://images.example/", lambda _: answer, take=take)
        assert buffered.held_bytes == 0, "what a failed attempt took is given back"
        five = httpx.Response(200, content=short())
        assert len(fetch("https://images.example/", lambda _: five, take=take)) == 500
        assert buffered.held_bytes == 500
    assert buffered.held_bytes == 0


async def short() -> AsyncIterator[bytes]:
    """500 bytes."""
    for _ in range(5):
        yield b"x" * 100


def test_a_request_fetches_no_more_than_it_may_send() -> None:
    taken: list[int] = []

    async def resolve(_: str) -> tuple[str, ...]:
        return (PUBLIC,)

    async def admitted() -> list[Media | ServiceError]:
        spec = read(ModelOptions(id="qwen3vl-tiny", load_format="dummy"))
        admission = Admission(spec, LimitOptions(max_body_bytes=1200), FetchOptions())
        network = httpx.MockTransport(lambda _: httpx.Response(200, content=short()))
        options = FetchOptions(allow_hosts=("images.example",))
        admission.fetcher = Fetcher(options, resolve, network)
        items = [RequestItem("image", url=f"https://images.example/{name}") for name in "abc"]
        return await admission.admit(items, taken.append)

    rejected = [each for each in asyncio.run(admitted()) if isinstance(each, TooLarge)]
    assert [str(each) for each in rejected] == [
        "the files of one request are over 1200 bytes together (limits.max_body_bytes): "
        "send fewer or smaller items, or raise the limit"
    ]
    assert sum(taken) == 1000


def test_hosts_without_an_address() -> None:
    with pytest.raises(InvalidMedia, match="cannot be found"):
        fetch("https://gone.example/", forbidden, hosts=("gone.example",))
    with pytest.raises(InvalidRequest, match="not public"):
        fetch("https://images.example/", forbidden, ())
