"""The encoder deployment. Each replica owns one device.

Lifecycle: load -> capture -> warm up -> ready -> drain -> stop. `__init__` returns after the
warm-up, and Serve sends no requests before that. Items are encoded in pipeline.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from time import monotonic
from typing import Any, TypeVar

import ray
from ray import serve

from actors.autoscaling import OUTSTANDING_PAIRS, OUTSTANDING_PATCHES, OUTSTANDING_SECONDS
from actors.errors import Unavailable
from actors.models.precision import precision_on
from actors.options import ActorOptions, refused, updated
from actors.pipeline import Pipeline, open_pipeline
from actors.rows.protocol import HeldRows
from actors.rows.server import RowsServer
from actors.rpc.server import ReplicaServer
from actors.store.kept import Kept
from actors.telemetry.metrics import EncoderMetrics
from actors.telemetry.tracing import NOBODY, ORIGIN, Origin, name_requests, open_spans
from actors.types import Dtype, Media, Reply, Work

log = logging.getLogger("ray.serve")

KEPT_ROWS_SECONDS = 5.0
"""How long a thread of the RowsServer waits for a call on the event loop, writing rows included."""
Result = TypeVar("Result")


class KeptRows:
    """Gives the threads of a RowsServer access to a pipeline. Calls run on the event loop."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.loop: asyncio.AbstractEventLoop | None = None

    def hold(self, name: str) -> HeldRows | None:
        return self._holding(self.pipeline.hold(name), name)

    def free(self, name: str) -> None:
        assert self.loop
        with suppress(RuntimeError):  # the loop is closed: the replica has stopped
            self.loop.call_soon_threadsafe(self.pipeline.free, name)

    def rows(self, name: str) -> memoryview:
        answer = self._begin(self.pipeline.rows(name))
        try:
            return answer.result(KEPT_ROWS_SECONDS).data
        except TimeoutError:
            answer.cancel()
            raise late() from None

    def take(self, name: str) -> memoryview | None:
        found = self._holding(self.pipeline.take(name), name)
        return None if found is None else found.data

    def release(self, name: str) -> None:
        assert self.loop
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.pipeline.references.release, name)

    def _holding(self, call: Coroutine[Any, Any, Result], name: str) -> Result:
        """Runs a call that places a hold on a name, unless it returns None.

        If the result comes too late, the hold is freed. The name is not released, because the
        reader may still fetch the embedding through the front door.
        """

        def free_late(done: Future[Result]) -> None:
            if not done.exception() and done.result() is not None:
                self.free(name)

        answer = self._begin(call)
        try:
            return answer.result(KEPT_ROWS_SECONDS)
        except TimeoutError:
            answer.add_done_callback(free_late)
            raise late() from None

    def _begin(self, call: Coroutine[Any, Any, Result]) -> Future[Result]:
        assert self.loop
        return asyncio.run_coroutine_threadsafe(call, self.loop)


def late() -> Unavailable:
    return Unavailable(f"the encoder did not answer within {KEPT_ROWS_SECONDS:g} s: try again")


class Encoder:
    """The deployment's class. Routers choose the replica for each item."""

    def __init__(
        self,
        options: ActorOptions,
        pool: str = "",
        largest_item: tuple[int, ...] | None = None,
    ) -> None:
        """`pool`, `largest_item`: reported to routers, see router.replicas.fleet.Replica."""
        name_requests()
        self.options = options
        self.about: dict[str, Any] = {"pool": pool} | (
            {"largest_item": largest_item} if largest_item else {}
        )
        self.spans = open_spans(options.tracing, "encoder")
        self.replica = serve.get_replica_context().replica_id.unique_id
        self.series = EncoderMetrics()
        self.pipeline = open_pipeline(options, self.series, self.spans, self.replica)
        self.outstanding = Work(0)
        self.waiting = Work(0)
        """This replica's share of the work that is queued in routers."""
        self.kept_rows = KeptRows(self.pipeline)
        engine = self.pipeline.engine
        port, lender = options.references.port, engine.device.lender
        self.rpc = ReplicaServer(self, RowsServer(self.kept_rows), port, lender)
        model, backend = engine.tower.spec.id, engine.device.backend
        log.info("encoder %s is ready: %s on %s", self.replica, model, backend)

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
        """See Pipeline.encode.

        `waiting_per_sent`: patches queued in the router per patch that it sent. `early`: called
        with answers as they are ready, except for the last ones, which are returned.
        """
        ORIGIN.set(origin)
        work = Work.of(item.plan.work for item in media)
        waiting = work.times(waiting_per_sent)

        def answered(part: Reply) -> None:
            nonlocal work
            assert early
            done = Work.of(media[place].plan.work for place in part.places)
            work = work.without(done)
            self.outstanding = self.outstanding.without(done)
            early(part)

        self.outstanding = Work.of([self.outstanding, work])
        self.waiting = Work.of([self.waiting, waiting])
        try:
            with self.spans.span(
                "shard", "server", replica=self.replica, items=len(media), patches=work.patches
            ):
                answers = await self.pipeline.encode(
                    media, dtype, timeout_seconds, keep=keep, early=early and answered, lend=lend
                )
        finally:
            self.outstanding = self.outstanding.without(work)
            self.waiting = self.waiting.without(waiting)
        return Reply(list(answers.values()), *self.outstanding, tuple(answers) if early else ())

    async def fetch(self, name: str) -> Kept | None:
        """See Pipeline.fetch."""
        return await self.pipeline.fetch(name)

    async def release(self, name: str) -> bool:
        return self.pipeline.references.release(name)

    def scrape(self) -> tuple[str, str]:
        """This replica's id, and its metrics in Prometheus' text format."""
        return self.replica, self.series.text()

    def item_tokens(self) -> tuple[str, str]:
        """This replica's id, and its items counted by their tokens, as JSON."""
        return self.replica, json.dumps(self.pipeline.engine.item_tokens.document())

    async def record_replica_metadata(self) -> dict[str, Any]:
        """Metadata for routers. Serve calls this once."""
        self.kept_rows.loop = asyncio.get_running_loop()
        process = ray.get_runtime_context()
        endpoint = await self.rpc.start(
            process.get_node_id(), ray.util.get_node_ip_address(), process.get_actor_name()
        )
        engine = self.pipeline.engine
        said = {
            **self.about,
            "fingerprint": self.pipeline.writer.fingerprint,
            "precision": precision_on(self.options.graphs, engine.device.device),
        }
        if engine.cost:
            said |= {"device": engine.device.name, "cost": asdict(engine.cost)}
        return said | endpoint.metadata

    async def record_routing_stats(self) -> dict[str, Any]:
        """The outstanding work from all routers. Serve calls this every second."""
        self.pipeline.references.expire(monotonic())
        patches, pairs = self.outstanding
        return {OUTSTANDING_PATCHES: patches, OUTSTANDING_PAIRS: pairs}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The outstanding work plus what is queued in routers, for the policy in autoscaling.py."""
        work = Work.of([self.outstanding, self.waiting])
        stats: dict[str, float] = {OUTSTANDING_PATCHES: work.patches}
        if cost := self.pipeline.engine.cost:
            stats[OUTSTANDING_SECONDS] = cost.work_seconds(work)
        return stats

    async def reconfigure(self, user_config: Any) -> None:
        """Called by Serve with the deployment's `user_config`. No option can change live."""
        with refused(running=True):
            updated(self.options, user_config, {})

    async def check_health(self) -> None:
        """Serve replaces a replica that raises here."""
        engine = self.pipeline.engine
        stalled_seconds = engine.stalled_seconds()
        if not self.pipeline.decoder.alive():
            raise Unavailable("the decoding processes do not start")
        if not engine.alive():
            raise Unavailable("the engine's thread has ended, see this replica's log")
        if stalled_seconds > self.options.encoder.max_stall_seconds:
            raise Unavailable(
                f"the engine is stuck: no pack has finished for {stalled_seconds:.0f} s"
            )

    async def stop(self) -> None:
        """Waits for calls over gRPC; Serve has already waited for its own."""
        await self.rpc.stop(self.options.encoder.drain_timeout_seconds)
        self.pipeline.close()

    def __del__(self) -> Coroutine[Any, Any, None] | None:
        """Called by Serve once, at shutdown. Serve awaits the coroutine."""
        if hasattr(self, "rpc") and self.rpc.running:
            return self.stop()
        if hasattr(self, "pipeline"):
            self.pipeline.close()
        return None
