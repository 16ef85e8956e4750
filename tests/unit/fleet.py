"""A fleet in memory: replicas that answer, hang or are lost as they are told."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np

from actors.rpc.server import Endpoint
from actors.types import Answer, Dtype, Embedding, ItemPlan, Media, Reply, Timings, Work
from router.dispatch import Dispatcher
from router.metrics import RouterMetrics
from router.options import RouterOptions
from router.policy.balance import largest_first
from router.replicas.fleet import Replica

Behaviour = Callable[[str, list[Media], float], Awaitable[list[Answer]]]


class MemoryFleet:
    """fleet.Fleet. `calls` lists replica and digests of every shard that came."""

    def __init__(self, replicas: Sequence[str], behaviour: Behaviour) -> None:
        self.replicas = list(replicas)
        self.behaviour = behaviour
        self.calls: list[tuple[str, list[str]]] = []
        self.waiting_per_sent = 0.0
        self.names = count()
        self.cancelled = 0
        self.hung: set[str] = set()
        """Replicas that do not answer when they are asked how they are."""
        self.asked = 0
        self.heard: Callable[[str, Work], None]
        self.metadata: dict[str, dict[str, Any]] = {}
        """What replicas say of themselves, where it is anything."""
        self.nodes: dict[str, str] = {}
        """Of replicas, where it matters."""

    def reports(self) -> Mapping[str, Replica]:
        return {
            name: Replica(
                self.metadata.get(name, {}),
                0,
                Endpoint(node, "", "", "", "") if (node := self.nodes.get(name)) else None,
            )
            for name in self.replicas
        }

    def near(self) -> Sequence[str]:
        return self.replicas

    def listen(self, heard: Callable[[str, Work], None]) -> None:
        self.heard = heard

    async def encode(
        self,
        replica: str,
        media: list[Media],
        dtype: Dtype,
        timeout_seconds: float,
        *,
        keep: bool,
        waiting_per_sent: float,
        early: Callable[[Reply], None] | None,
    ) -> Reply:
        self.calls.append((replica, [item.digest for item in media]))
        self.waiting_per_sent = waiting_per_sent
        try:
            if early:
                return await self.in_parts(replica, media, timeout_seconds, early)
            answers = await self.behaviour(replica, media, timeout_seconds)
            if keep:
                answers = [self.kept(answer) for answer in answers]
            return Reply(answers, 0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def in_parts(
        self,
        replica: str,
        media: list[Media],
        timeout_seconds: float,
        early: Callable[[Reply], None],
    ) -> Reply:
        """Each item is answered by itself, the last one in the reply."""
        tasks = {
            asyncio.ensure_future(self.behaviour(replica, [one], timeout_seconds)): place
            for place, one in enumerate(media)
        }
        try:
            while len(tasks) > 1:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in list(done)[: len(tasks) - 1]:
                    early(Reply(task.result(), 0, 0, (tasks.pop(task),)))
            ((last, place),) = tasks.items()
            return Reply(await last, 0, 0, (place,))
        finally:
            for task in tasks:
                task.cancel()

    def kept(self, answer: Answer) -> Answer:
        """Under an id like no other's."""
        assert isinstance(answer, Embedding)
        return replace(answer, reference=f"{answer.replica}.{next(self.names)}")

    async def check(self, replica: str) -> None:
        self.asked += 1
        while replica in self.hung:
            await asyncio.sleep(0.01)

    async def reach(self, replica: str) -> None:
        pass


def item(number: int, patches: int = 100) -> Media:
    """Equal numbers: identical items."""
    data = b"item %d" % number
    plan = ItemPlan((1, 2, patches // 2), patches, patches // 4, (patches // 4,))
    return Media("image", data, plan, hashlib.sha256(data).hexdigest())


def embedding(media: Media, replica: str) -> Embedding:
    """Its data is the digest."""
    data = np.frombuffer(bytes.fromhex(media.digest), np.uint8)
    return Embedding(data, "bfloat16", (1, 16), (1, 2, 2), "graph", Timings(0, 0, 0), replica)


async def well(replica: str, media: list[Media], timeout_seconds: float) -> list[Answer]:
    """The behaviour of a sound replica."""
    await asyncio.sleep(0)
    return [embedding(one, replica) for one in media]


def dispatcher(fleet: MemoryFleet, **options: Any) -> tuple[Dispatcher, RouterMetrics]:
    """Largest first over the fleet, ties to the earlier replica."""
    chosen = RouterOptions(**{"replica_wait_seconds": 0.05, "exclude_seconds": 60, **options})
    metrics = RouterMetrics()
    return Dispatcher(fleet, chosen, largest_first, metrics), metrics


async def collect(
    router: Dispatcher, media: Sequence[Media], timeout_seconds: float = 5
) -> list[Answer]:
    """All answers, in order; each position must come once."""
    answers: dict[int, Answer] = {}
    async for position, answer in router.answers(media, "bfloat16", timeout_seconds):
        assert position not in answers
        answers[position] = answer
    return [answers[position] for position in range(len(media))]


def right(media: Sequence[Media], answers: Sequence[Answer]) -> bool:
    """Whether every answer is that of its item."""
    return len(media) == len(answers) and all(
        isinstance(answer, Embedding)
        and isinstance(answer.data, np.ndarray)
        and answer.data.tobytes().hex() == one.digest
        for one, answer in zip(media, answers, strict=True)
    )


def settled(test: Coroutine[Any, Any, Dispatcher]) -> None:
    """Runs a test that gives its dispatcher, and sees that it carries nothing in the end."""

    async def run() -> None:
        router = await test
        for _ in range(10):
            await asyncio.sleep(0)
        assert router.ledger.outstanding.patches == 0
        assert not any(router.ledger.own(replica) for replica in router.refresh())
        async with asyncio.timeout(30):  # all but this one and the watches over replicas end
            while len(asyncio.all_tasks()) > 1 + len(router._liveness._watches):
                await asyncio.sleep(0.01)

    asyncio.run(run())
