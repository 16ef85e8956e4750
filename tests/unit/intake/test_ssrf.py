"""Server-side request forgery: what attackers write for an address inside leads nowhere.

With the system's own name service, which reads every spelling of a number; nothing is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from actors.errors import InvalidMedia, InvalidRequest, ServiceError
from encoder_service.config import FetchOptions
from encoder_service.intake.fetch import Fetcher, is_public, resolve
from tests.unit.front_door import freely

SPELLINGS = [
    "127.0.0.1",
    "2130706433",
    "0x7f000001",
    "0x7f.1",
    "017700000001",
    "0177.0.0.1",
    "127.1",
    "0",
    "0.0.0.0",
    "10.0.0.1",
    "167772161",
    "169.254.169.254",
    "2852039166",
    "0xa9fea9fe",
    "0251.0376.0251.0376",
    "168.63.129.16",
    "0xa83f8110",
    "100.100.100.200",
    "192.0.0.192",
    "[::ffff:168.63.129.16]",
    "[fd20:ce::254]",
    "[::1]",
    "[::]",
    "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]",
    "[::127.0.0.1]",
    "[64:ff9b::a9fe:a9fe]",
    "[fd00:ec2::254]",
    "[fe80::1]",
    "\uff11\uff12\uff17.0.0.1",
    "\u2460\u2461\u2466.0.0.1",
    "127\u30020\u30020\u30021",
    "localhost",
    "LOCALHOST",
    "localhost.",
]
"""Loopback, private networks and clouds' metadata: decimal, octal, hexadecimal, short, IPv6,
wrapped, and in Unicode's other digits and dots."""


def sent(request: httpx.Request) -> httpx.Response:
    """Nothing may be."""
    raise AssertionError(f"connected to {request.url}")


def fetch(url: str, *hosts: str) -> bytes:
    """With the real name service."""
    fetcher = Fetcher(FetchOptions(allow_hosts=hosts), resolve, httpx.MockTransport(sent))
    return asyncio.run(fetcher.get(url, freely))


@pytest.mark.parametrize("host", SPELLINGS)
def test_no_spelling_is_on_the_list(host: str) -> None:
    with pytest.raises(InvalidRequest):
        fetch(f"https://{host}/", "images.example")


@pytest.mark.parametrize("host", [one for one in SPELLINGS if one.isascii() and "[" not in one])
def test_not_even_when_an_operator_names_it(host: str) -> None:
    with pytest.raises((InvalidRequest, InvalidMedia), match=r"not public|cannot be"):
        fetch(f"https://{host}/", host)


@pytest.mark.parametrize(
    "url",
    [
        "https://images.example@127.0.0.1/",
        "https://127.0.0.1#@images.example/",
        "https://127.0.0.1\\@images.example/",
        "https://127.0.0.1/https://images.example/",
        "https://images.example\\.evil.example/",
        "https://images.example%2eevil.example/",
        "https://images.example%00.evil.example/",
        "https://images.example:443@evil.example/",
        "https://images.example:80/",
        "https:/\\127.0.0.1/",
        "//images.example/",
        "gopher://images.example/",
        "ftp://images.example/",
        "file://images.example/etc/passwd",
        "https://images.example\r\nHost: evil.example/",
        "\thttps://evil.example/",
    ],
)
def test_urls_that_parsers_read_differently(url: str) -> None:
    with pytest.raises(InvalidRequest):
        fetch(url, "images.example")


@pytest.mark.parametrize("inside", ["127.0.0.1", "168.63.129.16", "100.100.100.200"])
def test_a_name_that_changes_its_address_in_between(inside: str) -> None:
    answers: Iterator[tuple[str, ...]] = iter([("93.184.216.34",), (inside,)])
    connected: list[str] = []

    async def rebinding(host: str) -> tuple[str, ...]:
        return next(answers)

    def answer(request: httpx.Request) -> httpx.Response:
        connected.append(request.url.host)
        return httpx.Response(302, headers={"location": "/again"})

    options = FetchOptions(allow_hosts=("images.example",))
    fetcher = Fetcher(options, rebinding, httpx.MockTransport(answer))
    with pytest.raises(InvalidRequest, match="not public"):
        asyncio.run(fetcher.get("https://images.example/", freely))
    assert connected == ["93.184.216.34"]


def test_nothing_that_an_answer_sets_is_sent_again() -> None:
    seen: list[list[str]] = []

    async def same(host: str) -> tuple[str, ...]:
        return ("93.184.216.34",)

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(sorted(request.headers))
        if request.url.path == "/":
            headers = {"location": "/next", "set-cookie": "session=secret; Path=/"}
            return httpx.Response(302, headers=headers)
        return httpx.Response(200, content=b"image", headers={"set-cookie": "other=secret"})

    options = FetchOptions(allow_hosts=("a.example", "b.example"))

    async def both() -> None:
        fetcher = Fetcher(options, same, httpx.MockTransport(answer))
        await fetcher.get("https://a.example/", freely)
        await fetcher.get("https://b.example/c", freely)

    asyncio.run(both())
    assert len(seen) == 3
    assert not [headers for headers in seen if {"cookie", "authorization", "referer"} & {*headers}]


@pytest.mark.parametrize("host", SPELLINGS)
def test_redirects_do_not_lead_there(host: str) -> None:
    async def public(name: str) -> tuple[str, ...]:
        return ("93.184.216.34",)

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.host == "93.184.216.34"
        return httpx.Response(302, headers={b"location": f"https://{host}/".encode()})

    options = FetchOptions(allow_hosts=("images.example", "localhost", "127.0.0.1"))
    fetcher = Fetcher(options, public, httpx.MockTransport(answer))
    with pytest.raises(ServiceError):
        asyncio.run(fetcher.get("https://images.example/", freely))


def test_every_range_that_is_not_for_everybody() -> None:
    ranges = "0.0.0.1 10.255.0.1 100.64.0.1 127.9.9.9 169.254.169.254 172.31.255.1 192.0.0.1 "
    ranges += "192.168.9.9 198.18.0.1 203.0.113.1 224.0.0.1 240.0.0.1 255.255.255.255 "
    ranges += "::1 fc00::1 fe80::1 fec0::1 ff02::1 2001:db8::1 2002:a00:1:: 64:ff9b:1::1 100::1"
    assert not [one for one in ranges.split() if is_public(one)]
