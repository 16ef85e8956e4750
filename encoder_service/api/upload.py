"""Reads the body of an HTTP request, up to the limits, and parses its items and options."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from actors.errors import DeadlineExceeded, InvalidRequest, TooLarge, UnsupportedMedia
from encoder_service.config import LimitOptions
from encoder_service.intake.limits import Take, check_body_bytes, declared_bytes, offload
from encoder_service.wire.documents import KINDS, RequestItem, parse_request
from encoder_service.wire.formats import UnsupportedType, WireError, read_json

MOST_OPTIONS_BYTES = 4096
CHARSETS = (b"utf-8", b"us-ascii")
GZIP = b"\x1f\x8b"
GZIP_WINDOW = 16 + zlib.MAX_WBITS  # zlib's code for gzip
IN_BYTES, OUT_BYTES = 2**16, 2**20
"""Bytes per call of the decompressor: at most this much in, and this much out."""


async def read(
    request: Request, limits: LimitOptions, take: Take
) -> tuple[list[RequestItem], dict[str, Any]]:
    """Returns the items, and the options unchecked. `take` counts each chunk of the body.

    Raises TooLarge, InvalidRequest, UnsupportedMedia, DeadlineExceeded, and what `take` raises.
    """
    content_type = request.headers.get("content-type", "")
    if content_type.lower().startswith("multipart/form-data"):
        async with in_time(limits):
            return await multipart(request, limited(request, limits, take), limits)
    body = await read_body(request, limits, take)
    if body.startswith(GZIP):
        raise UnsupportedMedia("the body is gzip: say so with `Content-Encoding: gzip`, once")
    try:
        return await offload(len(body), parse_request, body, content_type)
    except UnsupportedType as error:
        raise UnsupportedMedia(str(error)) from None
    except WireError as error:
        raise InvalidRequest(str(error)) from None


async def read_body(request: Request, limits: LimitOptions, take: Take) -> bytes:
    """Reads the whole body. Raises TooLarge, DeadlineExceeded, and what `take` raises."""
    async with in_time(limits):
        return b"".join([chunk async for chunk in limited(request, limits, take)])


@asynccontextmanager
async def in_time(limits: LimitOptions) -> AsyncGenerator[None]:
    try:
        async with asyncio.timeout(limits.timeout_seconds):
            yield
    except TimeoutError:
        raise DeadlineExceeded(
            f"the body did not arrive within {limits.timeout_seconds:g} s (limits.timeout_seconds)"
        ) from None


def check_length(request: Request, limits: LimitOptions) -> None:
    """Raises TooLarge if the declared length exceeds limits.max_body_bytes."""
    check_body_bytes(declared_bytes(request.headers.get("content-length", "")), limits)


async def limited(request: Request, limits: LimitOptions, take: Take) -> AsyncGenerator[bytes]:
    """Yields the body's chunks, decompressed. Raises TooLarge as soon as the limit is exceeded, and
    reads no further. Raises UnsupportedMedia for a content encoding other than gzip."""
    check_length(request, limits)
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip"):
        raise UnsupportedMedia(f"content encoding {encoding!r} is not supported: send gzip or none")
    chunks = bounded(request.stream(), limits)
    async for chunk in bounded(unpacked(chunks), limits) if encoding == "gzip" else chunks:
        take(len(chunk))
        yield chunk


async def bounded(chunks: AsyncGenerator[bytes], limits: LimitOptions) -> AsyncGenerator[bytes]:
    seen = 0
    async for chunk in chunks:
        seen += len(chunk)
        check_body_bytes(seen, limits)
        yield chunk


async def unpacked(chunks: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """Decompresses gzip, in pieces of at most OUT_BYTES. Raises InvalidRequest."""
    decoder = zlib.decompressobj(GZIP_WINDOW)
    try:
        async for chunk in chunks:
            for start in range(0, len(chunk), IN_BYTES):
                left = chunk[start : start + IN_BYTES]
                while left and not decoder.eof:
                    yield await asyncio.to_thread(decoder.decompress, left, OUT_BYTES)
                    left = decoder.unconsumed_tail
                if left or decoder.unused_data:
                    raise InvalidRequest("the gzip body has data after its end: send one member")
    except zlib.error as error:
        raise InvalidRequest(f"the body is not gzip, or it is damaged: {error}") from None
    if not decoder.eof:
        raise InvalidRequest("the gzip body is cut short")


async def multipart(
    request: Request, chunks: AsyncGenerator[bytes], limits: LimitOptions
) -> tuple[list[RequestItem], dict[str, Any]]:
    """Reads file parts named by their kind, in order, and an optional JSON part named options."""
    _, parameters = parse_options_header(request.headers["content-type"])
    # Some of Python's codecs take quadratic time, or raise errors that the parser does not expect.
    if parameters.get(b"charset", b"utf-8").lower() not in CHARSETS:
        raise InvalidRequest("the charset of the multipart body is not utf-8: leave it out")
    parser = MultiPartParser(
        request.headers,
        chunks,
        max_files=limits.max_items,
        max_fields=1,
        max_part_size=MOST_OPTIONS_BYTES,
    )
    parser.spool_max_size = limits.max_body_bytes  # keeps images in memory, off the disk
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise refusal(error.message, limits) from None
    items: list[RequestItem] = []
    options: dict[str, Any] = {}
    try:
        for name, part in form.multi_items():
            if name == "options" and isinstance(part, str):
                options = read_json(part.encode())
            elif name in KINDS and isinstance(part, UploadFile):
                items.append(RequestItem(name, await part.read()))
            else:
                raise InvalidRequest(
                    f"part {name!r}: send files (with a filename) named image, video or audio, "
                    "and at most one part (without a filename) named options"
                )
    except (WireError, UnicodeError) as error:
        reason = str(error).removeprefix("the body ")
        raise InvalidRequest(
            f'the part `options` {reason}: send a JSON object, such as {{"dtype": "float32"}}'
        ) from None
    finally:
        await form.close()
    return items, options


def refusal(reason: str, limits: LimitOptions) -> InvalidRequest:
    """The parser's error, reworded if one of our limits caused it."""
    if reason.startswith("Too many files"):
        return TooLarge(
            f"over {limits.max_items} files in one request (limits.max_items): "
            "send several requests"
        )
    if reason.startswith("Too many fields"):
        return InvalidRequest("the multipart body has several parts without a filename: send one")
    if reason.startswith("Part exceeded"):
        return TooLarge(
            f"a part without a filename is over {MOST_OPTIONS_BYTES} bytes: "
            "send files with a filename, and short options"
        )
    return InvalidRequest(
        f"the multipart body cannot be read: have it written by an HTTP library ({reason})"
    )
