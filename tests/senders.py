"""Clients that use little CPU, because they share the machine with the service under test."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from random import Random

import httpx

TIMEOUT_SECONDS = 30.0


@dataclass(slots=True)
class Outcome:
    right: list[tuple[float, float]] = field(default_factory=list)
    """The time of each answer, and the seconds until it came."""
    refused_seconds: list[float] = field(default_factory=list)
    other: list[str] = field(default_factory=list)

    def answered(self, start: float, end: float) -> int:
        return sum(start <= when < end for when, _ in self.right)


Call = Callable[[Outcome], Coroutine[None, None, float]]
"""Sends one request and records it. Returns the seconds to wait before the next (Retry-After)."""


class Sender:
    """Sends the same request repeatedly, as bytes that are built once."""

    def __init__(self, url: str, images: Sequence[bytes], *, reference: bool = False) -> None:
        """`reference`: the embeddings stay in the service."""
        files = [("image", image) for image in images]
        options = {"options": '{"reference": true}'} if reference else None
        request = httpx.Request("POST", f"{url}/v1/encode", files=files, data=options)
        head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
        self.sent = f"POST /v1/encode HTTP/1.1\r\n{head}\r\n".encode() + request.read()
        self.host, self.port = request.url.host, request.url.port
        self.idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def post(self) -> tuple[int, float, bytes]:
        """Status, Retry-After and body. Raises OSError, EOFError, TimeoutError."""
        async with asyncio.timeout(TIMEOUT_SECONDS):
            reader, writer = await self.connection()
            try:
                writer.write(self.sent)
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = re.search(r"\ncontent-length: (\d+)\r", head)
                assert length is not None, head
                body = await reader.readexactly(int(length[1]))
            except BaseException:
                writer.close()
                raise
        self.idle.append((reader, writer))
        wait = re.search(r"\nretry-after: (\d+)\r", head)
        return int(head.split()[1]), float(wait[1]) if wait else 0.0, body

    async def connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self.idle:
            reader, writer = self.idle.pop()
            if not reader.at_eof():
                return reader, writer
            writer.close()
        return await asyncio.open_connection(self.host, self.port)

    async def call(self, outcome: Outcome) -> float:
        started = time.monotonic()
        try:
            status, wait_seconds, body = await self.post()
        except (OSError, EOFError) as error:  # includes TimeoutError
            outcome.other.append(repr(error))
            return 0.0
        now = time.monotonic()
        if status == 200:
            outcome.right.append((now, now - started))
        elif status == 429:
            outcome.refused_seconds.append(now - started)
        else:
            outcome.other.append(body.decode())
        return wait_seconds


async def closed(call: Call, outcome: Outcome, callers: int, seconds: float) -> None:
    """Closed loop: each caller waits for its answer, and for Retry-After, before it calls again."""
    end = time.monotonic() + seconds

    async def caller() -> None:
        while time.monotonic() < end:
            await asyncio.sleep(await call(outcome))

    await asyncio.gather(*(caller() for _ in range(callers)))


async def opened(call: Call, outcome: Outcome, per_second: float, seconds: float) -> None:
    """Open loop: requests arrive at random times, whether earlier ones are answered or not."""
    random = Random(1)
    start = due = time.monotonic()
    async with asyncio.TaskGroup() as group:
        while (due := due + random.expovariate(per_second)) < start + seconds:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            group.create_task(call(outcome))
