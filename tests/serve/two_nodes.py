"""Stand-in encoders on one node, the router on the other. Run by test_several_nodes.py."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from shutil import which

from ray import serve
from ray.serve.handle import DeploymentHandle

from actors.store.shared_memory import READ_SECONDS, SLOW_BYTES_PER_SECOND, here
from actors.types import Answer, Dtype, Embedding, Media, SharedBytes
from router.here import encode_here
from router.options import RouterOptions
from tests.serve.nodes import STORE_BYTES, Node, nodes
from tests.serve.object_store import used
from tests.serve.stand_in import BIG, BIG_BYTES, encoders, item, right, routed, status
from tests.waiting import within

LITTLE_BYTES = 2**20
"""More than Ray and Serve themselves have in the object stores."""
NUMBERS = count(1000)
MEGABITS = 200
"""Of the slow network, a second: somewhat more than SLOW_BYTES_PER_SECOND, because Ray pauses, and
the machine may be busy."""


def main() -> None:
    """Fails unless small and large rows come from the other node, also if they are several times
    the size of an object store."""
    front, back = {"resources": {"front": 1}}, {"resources": {"encoders": 1}}
    with nodes(front | {"num_cpus": 4}, back | {"num_cpus": 4}, proxies="Disabled") as (own, other):
        there = encoders(2, resources={"encoders": 0.1})
        app = routed(there, RouterOptions(), resources={"front": 0.1})
        router = serve.run(app, name="apart", route_prefix=None)
        assert {one.metadata["node"] for one in status(router).replicas} == {other.id}
        small_and_large(router)
        few_at_a_time(router)
        many_at_once(router, own, other)
        held_together(router, own)
        slowly(router)
    print("all nodes did their part")


def small_and_large(router: DeploymentHandle) -> None:
    for kind in (b"item", BIG):
        media = [item(number, 100, kind + b"%d" % number) for number in range(6)]
        answers = router.encode.remote(media, "bfloat16", 30.0).result(timeout_s=30)
        for answer in answers:
            assert isinstance(answer, Embedding)
            assert isinstance(answer.data, SharedBytes) == (kind == BIG)
        assert right(media, [asyncio.run(here(answer)) for answer in answers])


def few_at_a_time(router: DeploymentHandle) -> None:
    """Six times the size of a store, but only a third of it at once: nothing is spilled."""

    async def caller() -> None:
        for _ in range(18):
            await read(router, 4)

    async def callers() -> None:
        await asyncio.gather(caller(), caller())

    asyncio.run(callers())
    assert used().spilled_bytes == 0
    settle()


def many_at_once(router: DeploymentHandle, own: Node, other: Node) -> None:
    """Five times the size of a store at once. The encoders' node spills what has no room until it
    is read, and deletes it then. The reader's node spills nothing."""
    requests, items = 30, 4
    asked_bytes = requests * items * BIG_BYTES
    assert asked_bytes > 5 * STORE_BYTES
    most_files_bytes = most_bytes = 0

    async def at_once() -> None:
        nonlocal most_files_bytes, most_bytes
        reading = asyncio.gather(*(read(router, items) for _ in range(requests)))
        while not reading.done():
            await asyncio.wait([reading], timeout=0.2)
            most_files_bytes = max(most_files_bytes, spilled_file_bytes())
            most_bytes = max(most_bytes, used(own.id).bytes)
        await reading

    asyncio.run(at_once())
    spilled_bytes = used(other.id).spilled_bytes
    print(
        f"{asked_bytes / 1e6:.0f} MB at once between stores of {STORE_BYTES / 1e6:.0f} MB: "
        f"{spilled_bytes / 1e6:.0f} MB spilled, at most {most_files_bytes / 1e6:.0f} MB at a time; "
        f"reader's store at most {most_bytes / 1e6:.0f} MB"
    )
    assert spilled_bytes <= asked_bytes + LITTLE_BYTES
    assert used(own.id).spilled_bytes <= LITTLE_BYTES
    settle()


def held_together(router: DeploymentHandle, own: Node) -> None:
    """One request whose rows are four times the size of the reader's store. It holds all of them,
    so that most are in files until it releases them."""
    items = 100

    async def hold() -> int:
        media = [item(next(NUMBERS), 100, BIG) for _ in range(items)]
        answers = await encode_here(router.encode.remote, media, "bfloat16", 60.0)
        assert right(media, answers), answers
        return used(own.id).overflow_bytes

    overflow_bytes = asyncio.run(hold())
    print(f"{items * BIG_BYTES / 1e6:.0f} MB held: {overflow_bytes / 1e6:.0f} MB in files")
    assert items * BIG_BYTES - STORE_BYTES <= overflow_bytes <= items * BIG_BYTES
    assert used(own.id).spilled_bytes <= LITTLE_BYTES
    settle()


def slowly(router: DeploymentHandle) -> None:
    """Rows that are all asked for at once over a slow network, which takes longer for all of them
    than READ_SECONDS: none is encoded again."""
    if [name for _, name in socket.if_nameindex()] != ["lo"] or not which("tc"):
        print("the network was not slowed down: that needs tests/loopback and tc")
        return
    media = [item(next(NUMBERS), 100, BIG) for _ in range(60)]
    asked: list[list[Media]] = []

    async def encode(media: list[Media], dtype: Dtype, timeout_seconds: float) -> list[Answer]:
        asked.append(media)
        answers: list[Answer] = await router.encode.remote(media, dtype, timeout_seconds)
        return answers

    limit = f"tc qdisc add dev lo root tbf rate {MEGABITS}mbit burst 1mb latency 500ms"
    subprocess.run(limit.split(), check=True)
    since = time.monotonic()
    try:
        answers = asyncio.run(encode_here(encode, media, "bfloat16", 60.0))
    finally:
        subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], check=True)
    seconds = time.monotonic() - since
    assert right(media, answers)
    del answers
    print(f"{len(media) * BIG_BYTES / 1e6:.0f} MB over {MEGABITS} Mbit/s: {seconds:.1f} s")
    assert seconds > READ_SECONDS + BIG_BYTES / SLOW_BYTES_PER_SECOND
    assert asked == [media]
    settle()


async def read(router: DeploymentHandle, items: int) -> None:
    """One request. Its rows are released when they were compared."""
    media = [item(next(NUMBERS), 100, BIG) for _ in range(items)]
    assert right(media, await encode_here(router.encode.remote, media, "bfloat16", 60.0))


def settle() -> None:
    """Fails unless the stores and the spilled files are soon empty again."""
    within(10, lambda: used().bytes + used().overflow_bytes <= LITTLE_BYTES)
    within(10, lambda: spilled_file_bytes() <= LITTLE_BYTES)


def spilled_file_bytes() -> int:
    """Size of the files that Ray spills objects to."""
    found = 0
    for file in Path(os.environ["RAY_TMPDIR"]).rglob("ray_spilled_objects*/*"):
        with suppress(FileNotFoundError):
            found += file.stat().st_size
    return found


if __name__ == "__main__":
    main()
