"""`make hostile`: malicious clients, and how long others wait meanwhile.

Prints the longest wait of other callers, the growth of memory, and whether held memory is freed.
Exits with 1 if a limit is exceeded. RAY_SERVE_ENABLE_HA_PROXY=0 tests Serve's own proxy.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc
from PIL import Image
from rich.console import Console
from rich.table import Table

from encoder_service.bench.cluster import Cluster, cluster, logical_cpus, service
from encoder_service.config import load
from tests.images import encoded, jpeg
from tests.processes import ours

CONFIG = Path(__file__).parents[1] / "configs" / "tiny.yaml"
STOPPED_SECONDS = 3
"""HAProxy disconnects a client that neither sends nor reads for this long."""
SECONDS = 6.0
"""Length of each attack."""
MOST_SECONDS = 4.0
"""How long others may wait."""
MOST_GROWN = 300 * 2**20
"""How many bytes memory may grow: a body of limits.max_body_bytes, and the rest."""

os.environ.setdefault("RAY_SERVE_ENABLE_HA_PROXY", "1")
os.environ["RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S"] = str(STOPPED_SECONDS)


class Attacker:
    """Connections to the service's HTTP port, all closed at the end."""

    def __init__(self, port: int, stack: AsyncExitStack) -> None:
        self.port = port
        self.stack = stack

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**12)
        self.stack.callback(abort, writer)
        return reader, writer

    async def endless(self, begin: bytes, chunk: bytes) -> None:
        """Sends the same chunk until it is disconnected."""
        _, writer = await self.connect()
        writer.write(begin)
        with suppress(ConnectionError):
            while True:
                writer.write(chunk)
                await writer.drain()
                await asyncio.sleep(0)

    async def slow(self, begin: bytes, connections: int = 200) -> None:
        """Sends a byte per second on each of many connections."""
        writers = [(await self.connect())[1] for _ in range(connections)]
        for writer in writers:
            writer.write(begin)
        while True:
            await asyncio.sleep(1)
            for writer in writers:
                writer.write(b"a")

    async def header(self) -> None:
        await self.endless(b"GET /healthz HTTP/1.1\r\nX: ", b"a" * 2**16)

    async def slow_headers(self) -> None:
        await self.slow(b"GET /healthz HTTP/1.1\r\nX: ")

    async def slow_bodies(self) -> None:
        await self.slow(post("image/jpeg", 1_000_000))

    async def idle(self) -> None:
        for _ in range(2000):
            await self.connect()
        await asyncio.sleep(SECONDS)

    async def body(self) -> None:
        begin = post("image/jpeg", None)
        await self.endless(begin, b"10000\r\n" + b"a" * 2**16 + b"\r\n")

    async def unread(self) -> None:
        """Asks for the same small file 64 times: 25 MB of rows for one encoding. Reads none of
        them."""
        client = httpx.AsyncClient()
        file = ("image", ("a.png", encoded(Image.new("RGB", (1024, 1024)), "PNG")))
        given = client.build_request("POST", "http://a/v1/encode", files=[file] * 64)
        content = await given.aread()
        begin = post(given.headers["content-type"], len(content))
        for _ in range(50):
            _, writer = await self.connect()
            writer.transport.get_extra_info("socket").setsockopt(1, 8, 4096)  # SO_RCVBUF
            writer.write(begin + content)  # the StreamReader buffers no more than its limit
        await asyncio.sleep(SECONDS)


def abort(writer: asyncio.StreamWriter) -> None:
    if not writer.is_closing():
        writer.transport.abort()


def post(content_type: str, length: int | None) -> bytes:
    size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    head = f"POST /v1/encode HTTP/1.1\r\nHost: a\r\nContent-Type: {content_type}\r\n{size}\r\n\r\n"
    return head.encode()


ATTACKS: dict[str, Callable[[Attacker], Awaitable[None]]] = {
    "nothing": lambda attacker: asyncio.sleep(SECONDS),
    "a header that never ends": Attacker.header,
    "200 slow headers": Attacker.slow_headers,
    "200 slow bodies": Attacker.slow_bodies,
    "2,000 idle connections": Attacker.idle,
    "a chunked body that never ends": Attacker.body,
    "50 answers that nobody reads": Attacker.unread,
}


class Others:
    """Well-behaved callers on connections of their own; keeps each call's longest wait."""

    def __init__(self, where: Cluster) -> None:
        self.where = where
        self.image = jpeg(64, 64)
        self.waited: dict[str, float] = {}

    async def healthz(self) -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            (await client.get(f"{self.where.http}/healthz")).raise_for_status()

    async def encode(self) -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            files = {"image": self.image}
            (await client.post(f"{self.where.http}/v1/encode", files=files)).raise_for_status()

    async def check(self) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.where.grpc_port}") as channel:
            request = health_pb2.HealthCheckRequest()
            await health_pb2_grpc.HealthStub(channel).Check(request, timeout=60)

    async def call(self, name: str, call: Callable[[], Awaitable[None]]) -> None:
        while True:
            started = time.perf_counter()
            try:
                await call()
            finally:
                seconds = time.perf_counter() - started
                self.waited[name] = max(self.waited.get(name, 0), seconds)
            await asyncio.sleep(0.1)

    async def all(self) -> None:
        calls = {"healthz": self.healthz, "encode": self.encode, "gRPC health": self.check}
        async with asyncio.TaskGroup() as group:
            for name, call in calls.items():
                group.create_task(self.call(name, call))


def memory() -> int:
    """Anonymous memory of all processes of the service, in bytes."""
    total = 0
    for number in ours()[1:]:
        with suppress(OSError):
            lines = Path(f"/proc/{number}/status").read_text().splitlines()
            total += sum(1024 * int(line.split()[1]) for line in lines if "RssAnon" in line)
    return total


async def attack(where: Cluster, name: str) -> tuple[dict[str, float], int]:
    """Returns how long others waited, and by how much memory grew."""
    others = Others(where)
    before, most = memory(), 0
    async with AsyncExitStack() as stack:
        attacker = Attacker(int(where.http.rpartition(":")[2]), stack)
        attacking = asyncio.ensure_future(ATTACKS[name](attacker))
        calling = asyncio.ensure_future(others.all())
        end = time.perf_counter() + SECONDS
        while time.perf_counter() < end and not calling.done():
            await asyncio.sleep(0.2)
            most = max(most, memory())
        attacking.cancel()
        calling.cancel()
        for one in (attacking, calling):
            with suppress(asyncio.CancelledError):
                await one
    return others.waited, most - before


async def unsent(where: Cluster) -> float:
    """Bytes that are still held once clients that read nothing should have been disconnected."""
    async with httpx.AsyncClient(base_url=where.http, trust_env=False, timeout=60) as client:
        for _ in range(2 * STOPPED_SECONDS):
            page = (await client.get("/metrics")).text
            lines = [line for line in page.splitlines() if line.startswith("encoder_unsent_bytes")]
            if not (held := sum(float(line.split()[-1]) for line in lines)):
                break
            await asyncio.sleep(1)
    return held


async def attacks(where: Cluster) -> bool:
    shown = Table("attack", "others' longest wait, s", "memory grew by, MB", "unsent after, MB")
    good = True
    await attack(where, "nothing")  # connections, imports
    for name in ATTACKS:
        waited, grown = await attack(where, name)
        held = await unsent(where)
        said = ", ".join(f"{call} {seconds:.2f}" for call, seconds in waited.items())
        shown.add_row(name, said, f"{grown / 1e6:.0f}", f"{held / 1e6:.0f}")
        good &= max(waited.values()) < MOST_SECONDS and grown < MOST_GROWN and not held
    Console().print(shown)
    return good


def main() -> int:
    options = load(CONFIG)
    with cluster(logical_cpus(options)) as where, service(options, where):
        return 0 if asyncio.run(attacks(where)) else 1


if __name__ == "__main__":
    sys.exit(main())
