"""An encoder without a model. It sleeps by patches, one shard at a time, and returns digests.

Runs in Serve replicas, beside the real Router.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from actors.errors import DeadlineExceeded, InvalidMedia
from actors.rpc.server import ReplicaServer
from actors.store.kept import Kept
from actors.store.shared_memory import share
from actors.telemetry.tracing import NOBODY, Origin
from actors.types import (
    DTYPE_BYTES,
    Answer,
    Dtype,
    Embedding,
    ItemPlan,
    Media,
    Reply,
    Timings,
    Work,
)
from router.options import RouterOptions
from router.router import Router, RouterStatus

SECONDS_PER_PATCH = 10e-6
MAX_CALLS = 256
"""Calls that one encoder takes at a time."""
BAD = b"bad"
"""Items that begin with this are answered with an error."""
HELD = b"held"
"""Items that begin with this occupy their encoder until `let_go`."""
BIG = b"big"
"""Items that begin with this are answered with BIG_BYTES in shared memory: digest, then zeros."""
BIG_BYTES = 4 * 2**20
DIGEST_BYTES = 32
DRAIN_SECONDS = 3


class StandIn:
    """The methods of actors.encoder.Encoder that a router and Serve use."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.rpc = ReplicaServer(self)
        self.replica = serve.get_replica_context().replica_id.unique_id
        self.outstanding = Work(0)
        self.encoded: deque[str] = deque(maxlen=1000)
        self.sick = False
        self.mood = "answers"
        self._device = asyncio.Lock()
        self._let_go = asyncio.Event()

    async def encode(
        self,
        media: list[Media],
        dtype: Dtype,
        timeout_seconds: float,
        origin: Origin = NOBODY,
        keep: bool = False,
        waiting_per_sent: float = 0,
        early: Callable[[Reply], None] | None = None,
        lend: bool = False,
    ) -> Reply:
        """Answers with the digest of each item, as bytes. With `early`, items take turns."""
        work = Work.of(item.plan.work for item in media)
        self.outstanding = Work.of([self.outstanding, work])
        left = list(range(len(media)))
        answers: list[Answer] = []
        try:
            async with asyncio.timeout(timeout_seconds), self._device:
                while left:
                    places = left[:1] if early else left
                    answers = await self._encoded([media[place] for place in places], dtype)
                    if left == places:
                        break
                    assert early
                    early(Reply(answers, 0, 0, tuple(places)))
                    del left[: len(places)]
        except TimeoutError:
            answers = [DeadlineExceeded("too slow")] * len(left)
        finally:
            self.outstanding = self.outstanding.without(work)
        return Reply(answers, *self.outstanding, tuple(left))

    async def _encoded(self, media: list[Media], dtype: Dtype) -> list[Answer]:
        if any(item.data.startswith(HELD) for item in media):
            await self._let_go.wait()
        await asyncio.sleep(sum(item.plan.patches for item in media) * SECONDS_PER_PATCH)
        self.encoded += [item.digest for item in media]
        return [self._answer(item, dtype) for item in media]

    def _answer(self, item: Media, dtype: Dtype) -> Answer:
        if item.data.startswith(BAD):
            return InvalidMedia("not an image")
        data = np.frombuffer(bytes.fromhex(item.digest), np.uint8)
        if item.data.startswith(BIG):
            data = np.concatenate([data, np.zeros(BIG_BYTES - DIGEST_BYTES, np.uint8)])
        nothing, shape = Timings(0, 0, 0), (1, data.nbytes // DTYPE_BYTES[dtype])
        return Embedding(share(data), dtype, shape, (1, 2, 2), "graph", nothing, self.replica)

    async def fetch(self, name: str) -> Kept | None:
        return None

    async def release(self, name: str) -> bool:
        return False

    async def log(self) -> tuple[str, list[str]]:
        """The replica's id, and the digests of its last 1,000 items, few enough that Ray sends them
        by value.

        Ray aborts the caller if a broadcast's answer of over 100 KB is dropped as soon as it comes.
        """
        return self.replica, list(self.encoded)

    async def hold(self) -> None:
        """From now on, held items wait."""
        self._let_go.clear()

    async def let_go(self) -> None:
        """Held items continue, and so do later ones."""
        self._let_go.set()

    async def sicken(self) -> None:
        """From now on, the health check fails."""
        self.sick = True

    async def feel(self, mood: str) -> None:
        """How scrapes are answered from now on: "answers", "fails" or "hangs"."""
        self.mood = mood

    async def scrape(self) -> tuple[str, str]:
        if self.mood == "hangs":
            await asyncio.sleep(60)
        if self.mood == "fails":
            raise ValueError("no metrics today")
        return self.replica, "x 1\n"

    async def record_replica_metadata(self) -> dict[str, Any]:
        process = ray.get_runtime_context()
        node = process.get_node_id()
        endpoint = await self.rpc.start(
            node, ray.util.get_node_ip_address(), process.get_actor_name()
        )
        said = {"replica": self.replica, "version": self.version, "process": os.getpid()}
        return {**said, "node": node, **endpoint.metadata}

    async def __del__(self) -> None:
        await self.rpc.stop(DRAIN_SECONDS)

    async def record_routing_stats(self) -> dict[str, Any]:
        return {"outstanding_patches": self.outstanding.patches}

    async def check_health(self) -> None:
        if self.sick:
            raise RuntimeError("sick")


def item(number: int, patches: int, kind: bytes = b"item") -> Media:
    """An item that differs from that of any other number."""
    data = b"%s %d" % (kind, number)
    plan = ItemPlan((1, 2, patches // 2), patches, patches // 4, (patches // 4,))
    return Media("image", data, plan, hashlib.sha256(data).hexdigest())


def right(media: list[Media], answers: list[Answer]) -> bool:
    """Whether every answer is that of its item."""
    return len(media) == len(answers) and all(
        isinstance(answer, Embedding)
        and isinstance(answer.data, np.ndarray)
        and answer.data[:DIGEST_BYTES].tobytes().hex() == item.digest
        for item, answer in zip(media, answers, strict=True)
    )


def encoders(
    count: int, version: int = 1, resources: dict[str, float] | None = None
) -> serve.Application:
    """`count` encoders without a router. Another `version` causes a rolling update. `resources`:
    those that each encoder takes of its node."""
    return serve.deployment(
        StandIn,
        name="Encoder",
        num_replicas=count,
        ray_actor_options={"num_cpus": 0.1, "resources": resources or {}},
        max_ongoing_requests=MAX_CALLS,
        health_check_period_s=0.5,
        graceful_shutdown_timeout_s=DRAIN_SECONDS,
        request_router_config=RequestRouterConfig(
            request_router_class="router.replicas.pinned:PinnedRequestRouter",
            request_routing_stats_period_s=0.5,
        ),
    ).bind(version)


def routed(
    encoder: serve.Application | DeploymentHandle,
    options: RouterOptions,
    resources: dict[str, float] | None = None,
) -> serve.Application:
    """A router to encoders of this application or of another one."""
    return serve.deployment(
        Router,
        name="Router",
        num_replicas=options.replicas,
        ray_actor_options={"num_cpus": 0.1, "resources": resources or {}},
        max_ongoing_requests=1000,
        graceful_shutdown_timeout_s=3,
    ).bind([encoder], options)


def status(router: DeploymentHandle) -> RouterStatus:
    found: RouterStatus = router.status.remote().result(timeout_s=5)
    return found
