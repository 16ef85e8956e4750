"""Bodies that come slowly, break off, are too many at a time, or are made to hurt."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from starlette.types import Message

from actors.errors import Overloaded
from encoder_service.api.http import build
from encoder_service.config import LimitOptions
from encoder_service.intake.limits import Buffered
from tests.images import jpeg
from tests.unit.front_door import JSON, Fleet, client, service

IMAGE = {"content-type": "image/jpeg"}


def form(*parts: tuple[str, bytes], parameters: str = "") -> dict[str, Any]:
    """A multipart request: what follows the name of each part, and its content."""
    body = b"".join(
        f'--BB\r\nContent-Disposition: form-data; name="{head}\r\n\r\n'.encode() + content + b"\r\n"
        for head, content in parts
    )
    content_type = f"multipart/form-data; boundary=BB{parameters}"
    return {"content": body + b"--BB--\r\n", "headers": JSON | {"content-type": content_type}}


FILE = ('image"; filename="a"', jpeg(64, 64))


@pytest.mark.parametrize(
    ("sent", "status", "says"),
    [
        (form(FILE, ('options"', b"[" * 4000)), 400, "the part `options`"),
        (form(FILE, ('options"', b"[]")), 400, "the part `options` must be a map"),
        (form(FILE, ('options"', b"dtype=float32")), 400, "the part `options` is not JSON: "),
        (form(FILE, ('options"', b" " * 70_000)), 413, "over 4096 bytes"),
        (form(FILE, ('options"', b"{}"), ('options"', b"{}")), 400, "several parts without"),
        (form(FILE, ('options"; filename="o"', b"{}")), 400, "named options"),
        (form(('image"', b"x")), 400, "with a filename"),
        (form(FILE, parameters="; charset=undefined"), 400, "charset"),
        (form(FILE, parameters="; charset=punycode"), 400, "charset"),
        (form(FILE, FILE, FILE), 413, "limits.max_items"),
    ],
)
def test_forms_that_are_refused(sent: dict[str, Any], status: int, says: str) -> None:
    response = client(Fleet(), max_items=2).post("/v1/encode", **sent)
    assert response.status_code == status
    assert says in response.json()["error"]["message"]


def test_forms_that_are_taken() -> None:
    sent = form(FILE, ('options"', b'{"dtype": "bfloat16"}'), parameters="; charset=UTF-8")
    assert client(Fleet()).post("/v1/encode", **sent).status_code == 200


@pytest.mark.parametrize("length", ["9" * 5000, "9" * 18])
def test_a_length_of_many_digits_is_too_large(length: str) -> None:
    headers = IMAGE | {"content-length": length}
    fleet = Fleet()
    assert client(fleet).post("/v1/encode", content=b"x", headers=headers).status_code == 413
    fleet.full = Overloaded("full", 1.2)  # what can never be taken is not told to come back
    assert client(fleet).post("/v1/encode", content=b"x", headers=headers).status_code == 413


@pytest.mark.parametrize("end", [{"type": "http.disconnect"}, RuntimeError("cancelled")])
def test_a_hang_up_during_upload_is_nobodys_fault(
    end: Message | Exception, caplog: pytest.LogCaptureFixture
) -> None:
    one, sent = service(Fleet()), []
    messages: Iterator[Message | Exception] = iter(
        [{"type": "http.request", "body": b"x", "more_body": True}, end]
    )

    async def receive() -> Message:
        message = next(messages)
        if isinstance(message, Exception):
            raise message
        return message

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/encode",
        "query_string": b"",
        "headers": [(b"content-type", b"image/jpeg")],
    }
    with caplog.at_level(logging.DEBUG, "ray.serve"):
        asyncio.run(build(one)(scope, receive, send))
    assert 'encoder_requests_total{api="http",code="499"} 1.0' in one.metrics.text()
    # The access log has a line for it; nothing complains.
    assert not [one for one in caplog.records if one.levelno > logging.INFO]
    assert not sent
    assert one.buffered.held_bytes == 0


async def trickle(stop: asyncio.Event) -> AsyncIterator[bytes]:
    """A body that goes on when it may."""
    yield b"x" * 600
    await stop.wait()


def test_uploads_end_and_their_bytes_are_bounded() -> None:
    limits = {"max_body_bytes": 1000, "max_buffered_bytes": 1000, "timeout_seconds": 1.5}

    async def run() -> None:
        one, stop = service(Fleet(), **limits), asyncio.Event()
        transport = httpx.ASGITransport(build(one))
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as http:
            post = http.post("/v1/encode", content=trickle(stop), headers=IMAGE)
            slow = asyncio.create_task(post)
            while not one.buffered.held_bytes:
                await asyncio.sleep(0.01)
            busy = await http.post("/v1/encode", content=b"x" * 500, headers=IMAGE)
            assert (busy.status_code, busy.json()["error"]["type"]) == (429, "overloaded")
            assert busy.headers["retry-after"] == "1"
            late = await slow
            assert (late.status_code, "did not arrive" in late.text) == (504, True)
            assert one.buffered.held_bytes == 0
            after = await http.post("/v1/encode", content=b"x" * 500, headers=IMAGE)
            assert after.status_code == 400

    asyncio.run(run())


def test_what_is_taken_is_given_back() -> None:
    buffered = Buffered(10, "too much (limits.max_buffered_bytes)")
    with buffered.hold() as take:
        take(6)
        with buffered.hold() as other:
            other(4)
        with pytest.raises(Overloaded, match=r"limits\.max_buffered_bytes"):
            take(5)
    assert buffered.held_bytes == 0


def test_limits_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="max_buffered_bytes is less"):
        LimitOptions(max_body_bytes=10, max_buffered_bytes=9)
