"""What takes bytes from strangers. A target returns, or raises one of ours; all else is a fault."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
from aiohttp import StreamReader
from aiohttp.base_protocol import BaseProtocol
from google.protobuf.message import DecodeError

from actors.errors import InvalidMedia, InvalidRequest, NotAcceptable, ServiceError, Unauthorized
from actors.families import registry
from actors.media.image import decode, prepare
from actors.media.patchify import patchifier_of
from actors.options import ModelOptions
from encoder_service import client
from encoder_service.api.auth import Tokens
from encoder_service.api.grpc import EncoderCalls
from encoder_service.api.http import ENCODE_PATH, build, choose
from encoder_service.client.items import read_items
from encoder_service.client.receiving import read_embeddings
from encoder_service.config import AuthOptions, FetchOptions, LimitOptions
from encoder_service.intake.fetch import Fetcher
from encoder_service.intake.media import probe
from encoder_service.wire import encoder_pb2 as pb
from encoder_service.wire.encoder_grpc import unpacked
from encoder_service.wire.formats import JSON, MSGPACK, WireError
from tests.fuzz import seeds
from tests.unit.api.test_rpc import Aborted, Context
from tests.unit.front_door import MODEL, Fleet, service

LIMITS = LimitOptions(max_pixels=300_000, max_body_bytes=200_000)
DOCUMENTED = {200, 400, 406, 413, 415, 422, 504}
"""Statuses of what a stranger's bytes may cause: never 500. They may ask for too little time."""
CODES = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}


@dataclass(frozen=True)
class Target:
    """What is called, on what it likes, and how often in every run of the tests."""

    call: Callable[[bytes], object]
    seeds: Callable[[], list[bytes]]
    raises: tuple[type[Exception], ...] = ()
    examples: int = 300


def encode_image(data: bytes) -> None:
    """An image as it comes: its header at the front door, its pixels in the actor."""
    media = probe(data, "image", CUTTER.spec, LIMITS)
    item = prepare(CUTTER, media)
    assert item.plan == media.plan


def encode_video(data: bytes) -> None:
    """A video as it comes: its container at the front door, its frames in the actor."""
    media = probe(data, "video", CUTTER.spec, LIMITS)
    assert prepare(CUTTER, media).plan == media.plan


def encode_sound(data: bytes) -> None:
    """A sound as it comes: its packets at the front door, its samples in the actor."""
    media = probe(data, "audio", HEARING.spec, LIMITS)
    assert prepare(HEARING, media).plan == media.plan


def decode_image(data: bytes) -> None:
    """The actor's decoder alone, for files whose header declares few pixels."""
    try:
        probe(data, "image", CUTTER.spec, LIMITS)
    except InvalidMedia:
        return
    pixels = decode(data)
    assert pixels.shape[0] == 3


def post(content_type: str) -> Callable[[bytes], None]:
    """The whole of the HTTP front door, but for Serve's proxy."""
    headers = [(b"content-type", content_type.encode()), (b"accept", b"application/json")]

    def call(data: bytes) -> None:
        sent: list[Any] = []
        told = iter([{"type": "http.request", "body": data, "more_body": False}])

        async def receive() -> dict[str, Any]:
            return next(told, {"type": "http.disconnect"})

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": ENCODE_PATH,
            "query_string": b"",
            "headers": headers,
        }
        asyncio.run(APP(scope, receive, send))
        assert sent[0]["status"] in DOCUMENTED, sent

    return call


def grpc_encode(data: bytes) -> None:
    """The whole of the gRPC front door, from the message's bytes on."""
    context = Context()
    with suppress(Aborted):
        asyncio.run(CALLS.Encode(pb.EncodeRequest.FromString(data), context))
    assert context.code in CODES, context.details


def grpc_response(data: bytes) -> None:
    """A message with embeddings, as the client reads it. Protobuf reads the same."""
    _, items = unpacked(pb.EncodeResponse, data)
    same = pb.EncodeResponse.FromString(data)
    assert len(items) == len(same.items)
    assert [bytes(rows) for _, rows in items] == [one.data for one in same.items]


def read_response(data: bytes) -> None:
    """A response with embeddings, as the client reads it from its connection."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        content = StreamReader(BaseProtocol(loop), 2**16, loop=loop)
        content.feed_data(data)
        content.feed_eof()
        document = await read_embeddings(content)
        read_items(document, len(document["items"]))

    asyncio.run(run())


def check_url(data: bytes) -> None:
    """What may be fetched is at the host that is named, over https, at its port."""
    url = data.decode(errors="replace")
    target = FETCHER.check(url)
    assert (target.scheme, target.host, target.userinfo) == ("https", "images.example", b"")
    assert target.port in (None, 443)


def redirect(data: bytes) -> None:
    """Wherever an answer leads, it stays at the host."""
    source = httpx.URL("https://images.example/a/b")
    target = FETCHER.check_redirect(source, data.decode(errors="replace"))
    assert (target.scheme, target.host) == ("https", "images.example")


def authorize(data: bytes) -> None:
    """Nothing but the token lets anybody in."""
    header = data.decode("latin-1")
    CLOSED.authorize(header)
    assert header.split()[-1:] == ["open"]


CUTTER = patchifier_of(registry.read(MODEL))
HEARING = patchifier_of(registry.read(ModelOptions(id="whisper-tiny", load_format="dummy")))
APP = build(service(Fleet(), max_body_bytes=LIMITS.max_body_bytes))
CALLS = EncoderCalls(service(Fleet(), max_body_bytes=LIMITS.max_body_bytes), 1000)
FETCHER = Fetcher(FetchOptions(allow_hosts=("images.example",)))
CLOSED = Tokens(AuthOptions(token_sha256=(hashlib.sha256(b"open").hexdigest(),)))

URLS = [
    b"https://images.example/a.jpg?b=c#d",
    b"https://user:word@images.example:443/",
    b"//other/",
]
FORM = "multipart/form-data; boundary=BB"

TARGETS = {
    "image": Target(encode_image, seeds.images, (ServiceError,), 600),
    "video": Target(encode_video, seeds.videos, (ServiceError,), 300),
    "sound": Target(encode_sound, seeds.sounds, (ServiceError,), 300),
    "decoder": Target(decode_image, seeds.images, (ServiceError,), 600),
    "http_json": Target(post(JSON), lambda: seeds.requests(JSON), examples=200),
    "http_msgpack": Target(post(MSGPACK), lambda: seeds.requests(MSGPACK), examples=200),
    "http_form": Target(post(FORM), seeds.forms, examples=200),
    "http_image": Target(post("image/png"), seeds.images, examples=200),
    "http_accept": Target(
        lambda data: choose(data.decode("latin-1")),
        lambda: [b"application/json;q=0.5, */*", b"application/msgpack"],
        (NotAcceptable,),
    ),
    "grpc": Target(grpc_encode, seeds.messages, (DecodeError,), 300),
    "grpc_response": Target(grpc_response, seeds.grpc_responses, (DecodeError,), 300),
    "response": Target(read_response, seeds.responses, (WireError, client.ServiceError)),
    "url": Target(check_url, lambda: URLS, (InvalidRequest,)),
    "redirect": Target(redirect, lambda: [*URLS, b"/c", b"?x"], (InvalidRequest, InvalidMedia)),
    "authorize": Target(authorize, lambda: [b"Bearer open", b"bearer  open "], (Unauthorized,)),
}


def run(name: str, data: bytes) -> None:
    """One input. Raises what must not happen."""
    target = TARGETS[name]
    try:
        target.call(data)
    except target.raises:
        return
