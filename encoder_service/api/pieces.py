"""The body of a response in pieces: rows go to the socket from the shared memory that they lie in.

A copy of 3.3 MB, made in a thread, takes as much of the processor as sending them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from fastapi import Response
from starlette.types import Receive, Scope, Send

from encoder_service.ops.offload import INLINE_BYTES, offload
from encoder_service.wire.formats import Piece


class View(np.ndarray[Any, np.dtype[np.uint8]]):
    """Bytes where they lie, [length]: a body as ASGI has it, but for its type.

    Where Serve's Python proxy is between it is pickled, as bytes.
    """

    def __bool__(self) -> bool:
        return self.size > 0

    def __reduce__(self) -> tuple[type[bytes], tuple[bytes]]:
        return bytes, (self.tobytes(),)


class InPieces(Response):
    """Sends one after the other, each when there is room for it."""

    def __init__(self, pieces: Sequence[Piece], media_type: str) -> None:
        length = sum(len(piece) for piece in pieces)
        super().__init__(headers={"content-length": str(length)}, media_type=media_type)
        self.pieces = gathered(pieces)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        status, headers = self.status_code, self.raw_headers
        await send({"type": "http.response.start", "status": status, "headers": headers})
        *pieces, last = self.pieces
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": last})


async def response(pieces: Sequence[Piece], media_type: str) -> Response:
    """Of pieces whose length is their number of bytes."""
    # uvloop, which Ray's actors run, writes any buffer; asyncio's own loop knows bytes.
    if type(asyncio.get_running_loop()).__module__.startswith("uvloop"):
        return InPieces(pieces, media_type)
    length = sum(len(piece) for piece in pieces)
    return Response(await offload(length, b"".join, pieces), media_type=media_type)


def gathered(pieces: Sequence[Piece]) -> list[bytes | View]:
    """The small ones that follow each other as one; the others where they lie."""
    found: list[bytes | View] = []
    small: list[Piece] = []
    for piece in pieces:
        if len(piece) <= INLINE_BYTES:
            small.append(piece)
            continue
        found += [b"".join(small), np.frombuffer(piece, np.uint8).view(View)]
        small = []
    return [*found, b"".join(small)]
